"""What a device can do at most, and what it reaches in a plain copy and a plain matrix product."""

from dataclasses import dataclass

import torch

from batchrun_kernels.triton.bench.timer import time_s


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes to or from memory, and 16-bit multiplications and additions (dense, each counts one), a second."""

    name: str
    bytes_per_s: float
    flops_per_s: float

    def floor_s(self, num_bytes: int, flops: int) -> float:
        """Seconds below which nothing that moves and computes so much can get."""
        return max(num_bytes / self.bytes_per_s, flops / self.flops_per_s)


# From the vendors' data sheets. The first whose name is part of a device's is meant.
NOMINAL = (
    Peak("B200", 8.0e12, 2250e12),
    Peak("H200", 4.8e12, 989e12),
    Peak("H100 NVL", 3.9e12, 835e12),
    Peak("H100 PCIe", 2.0e12, 756e12),
    Peak("H100", 3.35e12, 989e12),
    Peak("A100-SXM4-40GB", 1.55e12, 312e12),
    Peak("A100", 2.0e12, 312e12),
    Peak("MI300X", 5.3e12, 1307e12),
)


def nominal(device_name: str) -> Peak | None:
    """The data sheet's, by `torch.cuda.get_device_name`; None for a device that is not listed."""
    return next((peak for peak in NOMINAL if peak.name in device_name), None)


def reached(device: torch.device, *, copied: int = 1 << 31, size: int = 8192) -> Peak:
    """What torch gets out of a GPU: copying `copied` bytes, multiplying two bfloat16 matrices of `size`."""
    source = torch.empty(copied, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    copy_s = time_s(lambda: target.copy_(source), device)
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    out = torch.empty_like(a)
    product_s = time_s(lambda: torch.mm(a, b, out=out), device)
    return Peak("reached by torch", 2 * copied / copy_s, 2 * size**3 / product_s)
