"""The C matrix product with weights of int8 beside that with weights of float32, over the same shapes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial

import torch

from batchrun_kernels.bench.case import Case, Prepared, Way, num_cold
from batchrun_kernels.bench.cpu_linear import ROWS, SHAPES
from batchrun_kernels.packed import PackedWeight, reference_linear
from batchrun_kernels.packed_int8 import Int8Weight, round_rows

# Numbers are as they are rounded, so that both types multiply the same: sums of size one, in float32.
_TOLERANCE = 2e-5


@dataclass(frozen=True, slots=True)
class _Weights:
    """Copies of one random weight, in both types."""

    plain: torch.Tensor
    int8: list[Int8Weight]
    float32: list[PackedWeight]

    @classmethod
    def make(cls, k: int, num_outputs: int) -> "_Weights":
        weight = torch.randn(num_outputs, k, generator=torch.Generator().manual_seed(0)) / k**0.5
        weight = Int8Weight.pack(weight).unpack()
        # As many as are cold in the smaller type.
        copies = range(num_cold(weight.numel()))
        return cls(weight, [Int8Weight.pack(weight) for _ in copies], [PackedWeight.pack(weight) for _ in copies])


def linear_int8_cases() -> Iterator[Case]:
    for name, (k, num_outputs) in SHAPES.items():
        # Made for the first case of the shape that is prepared, and freed after its last.
        weights = cache(partial(_Weights.make, k, num_outputs))
        for rows in ROWS:
            yield Case(
                "gemm_int8",
                f"{name} {k}->{num_outputs}, {rows} rows",
                num_bytes=k * num_outputs + 4 * rows * (k + num_outputs),
                # An instruction multiplies four times as many numbers as of float32.
                num_flops=rows * k * num_outputs // 2,
                prepare=partial(_prepare, weights, rows, k),
            )


def _prepare(weights: Callable[[], _Weights], rows: int, k: int) -> Prepared:
    given = weights()
    x = round_rows(torch.randn(rows, k, generator=torch.Generator().manual_seed(1)))
    return Prepared(
        (
            Way("int8", lambda copy: given.int8[copy].linear(x, None)),
            Way("float32", lambda copy: given.float32[copy].linear(x, None)),
        ),
        partial(reference_linear, x, given.plain, None),
        _TOLERANCE,
        len(given.int8),
    )
