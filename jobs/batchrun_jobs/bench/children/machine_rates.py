"""What this machine can do at most, on the threads that the ways have: the rates that a floor is made of."""

import time
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, TypedDict

import torch

from batchrun_kernels import native
from batchrun_kernels.bench.ceiling import measure_cpu
from batchrun_kernels.packed import PackedWeight

if TYPE_CHECKING:
    from batchrun_jobs.bench.contract import Given

# Large enough for any library's best tile, and in the third-level cache.
_SIDE = 1536
_READ_FLOATS = 64 << 20
# Long enough for a processor to leave the clock that it has after a rest, which it does not keep up.
_LASTING_S = 1.5


class Rates(TypedDict):
    """Operations and bytes a second; what registers alone would allow is None without the C library."""

    matrix_flops_per_s: float
    bytes_per_s: float
    multiply_adds_flops_per_s: float | None


@torch.inference_mode()
def run(given: "Given") -> Rates:
    """What the fastest float32 matrix product at hand, and reading memory as a stream, keep up."""
    torch.set_num_threads(given["threads"])
    x = torch.randn(_SIDE, _SIDE)
    products: list[Callable[[], object]] = [lambda: x @ x]
    ceiling = None
    if native.find() is not None:
        packed = PackedWeight.pack(x)
        products.append(lambda: packed.linear(x, None))
        ceiling = measure_cpu()
    return {
        "matrix_flops_per_s": 2 * _SIDE**3 / min(map(_lasting_s, products)),
        "bytes_per_s": ceiling.bytes_per_s if ceiling else _read_bytes_per_s(),
        "multiply_adds_flops_per_s": ceiling.flops_per_s if ceiling else None,
    }


def _read_bytes_per_s() -> float:
    x = torch.ones(_READ_FLOATS)
    return x.nbytes / _lasting_s(x.sum)


def _lasting_s(call: Callable[[], object]) -> float:
    """Seconds of a call, the median over a while."""
    seconds: list[float] = []
    until = time.perf_counter() + _LASTING_S
    while (start := time.perf_counter()) < until:
        call()
        seconds.append(time.perf_counter() - start)
    return median(seconds)
