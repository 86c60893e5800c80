"""What the GPU is, and what torch alone gets out of it: the floors are held against the data sheet's numbers."""

import importlib.metadata
from collections.abc import Iterator

import torch

from batchrun_kernels.triton.bench.peak import Peak, nominal, reached
from tests.gpu.part import Machine, Part, Result

# What a dry run reckons with.
ASSUMED = "H200"


def plan() -> Iterator[str]:
    peak = assumed()
    yield f"copy 2 GiB: {peak.floor_s(2 << 31, 0) * 1e3:.2f} ms at the {peak.name}'s {peak.bytes_per_s / 1e12:.2f} TB/s"
    flops = 2 * 8192**3
    yield (
        f"multiply two bfloat16 matrices of 8192: {flops / 1e12:.2f} TFLOP, {peak.floor_s(0, flops) * 1e3:.2f} ms at "
        f"{peak.flops_per_s / 1e12:.0f} TFLOP/s"
    )


def run(machine: Machine) -> Iterator[Result]:
    if not machine.is_gpu:
        yield Result("device", "CPU", True, f"torch {torch.__version__}; nothing of this part runs without a GPU")
        return
    name = torch.cuda.get_device_name(machine.device)
    free, total = torch.cuda.mem_get_info(machine.device)
    yield Result(
        "device",
        name,
        True,
        f"torch {torch.__version__}, CUDA {torch.version.cuda}, Triton {importlib.metadata.version('triton')}, "
        f"{free / 2**30:.0f} of {total / 2**30:.0f} GiB free",
    )
    peak = reached(machine.device)
    numbers = {"bytes_per_s": peak.bytes_per_s, "flops_per_s": peak.flops_per_s}
    words = f"{peak.bytes_per_s / 1e12:.2f} TB/s copied, {peak.flops_per_s / 1e12:.0f} TFLOP/s multiplied"
    yield Result("device", peak.name, True, words, numbers)


def peak_of(device: torch.device) -> Peak:
    """The data sheet's numbers for a listed GPU, those reached by torch for another."""
    return nominal(torch.cuda.get_device_name(device)) or reached(device)


def assumed() -> Peak:
    peak = nominal(ASSUMED)
    assert peak is not None, ASSUMED
    return peak


PART = Part("device", "what the GPU is and what torch reaches on it", 30, plan, run)
