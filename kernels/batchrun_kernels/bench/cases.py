"""All cases that this machine can run, by their operations."""

from collections.abc import Callable, Iterator

from batchrun_kernels.bench.case import Case
from batchrun_kernels.bench.cpu_attention import attention_cases
from batchrun_kernels.bench.cpu_elementwise import elementwise_cases
from batchrun_kernels.bench.cpu_linear import largest_cases, linear_cases
from batchrun_kernels.bench.cpu_linear_int8 import linear_int8_cases

# Each gives its cases one by one, so that one case's memory is freed before the next is prepared.
_CPU: tuple[Callable[[], Iterator[Case]], ...] = (
    linear_cases,
    largest_cases,
    linear_int8_cases,
    attention_cases,
    elementwise_cases,
)


def cpu_cases() -> Iterator[Case]:
    for cases in _CPU:
        yield from cases()
