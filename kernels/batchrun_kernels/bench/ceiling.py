"""What the processor can do at most, measured: the rates that floors are made of."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from batchrun_kernels import native
from batchrun_kernels.bench.case import Case

_READ_FLOATS = 64 << 20
_MULTIPLY_ADDS = 1_000_000
_FLOPS_A_ROUND = 192
_TRIES = 5


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Rates of all threads together: memory read as a stream, and multiply-adds on registers, two operations each."""

    bytes_per_s: float
    flops_per_s: float

    def floor_s(self, case: Case) -> float:
        return max(case.num_bytes / self.bytes_per_s, case.num_flops / self.flops_per_s)

    def is_memory_bound(self, case: Case) -> bool:
        return case.num_bytes / self.bytes_per_s > case.num_flops / self.flops_per_s


def measure_cpu() -> Ceiling:
    """The best of a few tries on the threads that torch has; needs the C library."""
    library = native.needed()
    x = torch.ones(_READ_FLOATS)
    read_s = _best_s(lambda: library.batchrun_read(x.data_ptr(), _READ_FLOATS))
    multiply_s = _best_s(lambda: library.batchrun_multiply_add(_MULTIPLY_ADDS))
    flops = _MULTIPLY_ADDS * _FLOPS_A_ROUND * library.batchrun_threads()
    return Ceiling(x.nbytes / read_s, flops / multiply_s)


def measure_torch(size: int = 1536) -> Ceiling:
    """The same by what torch reaches, in a matrix product of `size` and a sum: without the C library."""
    x, a, b = torch.ones(_READ_FLOATS), torch.ones(size, size), torch.ones(size, size)
    read_s = _best_s(x.sum)
    multiply_s = _best_s(lambda: torch.mm(a, b))
    return Ceiling(x.nbytes / read_s, 2 * size**3 / multiply_s)


def _best_s(call: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_TRIES):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
