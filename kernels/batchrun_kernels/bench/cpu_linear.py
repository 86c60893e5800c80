"""The C matrix product beside oneDNN's prepacked one and torch's own, over the linear shapes of SmolLM2-135M.

And its largest outputs alone, of the head, beside a search through all of them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from batchrun_kernels.bench.case import Case, Prepared, Way, num_cold
from batchrun_kernels.packed import PackedWeight, reference_linear

# By name: (k, outputs).
SHAPES = {"qkv": (576, 960), "o": (576, 576), "gate_up": (576, 3072), "down": (1536, 576), "lm_head": (576, 49152)}
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
# Weights of size 1 / sqrt(k): sums of size one, in float32.
_TOLERANCE = 2e-5
# What oneDNN is told of the rows when it packs; 1 packs worse.
_PACKED_FOR = 16


@dataclass(frozen=True, slots=True)
class _Weights:
    """Copies of one random weight, each packed as its way wants it."""

    plain: list[Tensor]
    ours: list[PackedWeight]
    onednn: list[Tensor]

    @classmethod
    def make(cls, k: int, num_outputs: int) -> "_Weights":
        weight = torch.randn(num_outputs, k, generator=torch.Generator().manual_seed(0)) / k**0.5
        copies = range(num_cold(weight.nbytes))
        return cls(
            [weight.clone() for _ in copies],
            [PackedWeight.pack(weight) for _ in copies],
            [torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR) for _ in copies],
        )


def linear_cases() -> Iterator[Case]:
    for name, (k, num_outputs) in SHAPES.items():
        # Made for the first case of the shape that is prepared, and freed after its last.
        weights = cache(partial(_Weights.make, k, num_outputs))
        for rows in ROWS:
            num_floats = k * num_outputs + rows * (k + num_outputs)
            yield Case(
                "gemm",
                f"{name} {k}->{num_outputs}, {rows} rows",
                num_bytes=4 * num_floats,
                num_flops=2 * rows * k * num_outputs,
                prepare=partial(_prepare, weights, rows, k),
            )


def largest_cases() -> Iterator[Case]:
    k, num_outputs = SHAPES["lm_head"]
    weights = cache(partial(_Weights.make, k, num_outputs))
    for rows in ROWS:
        yield Case(
            "largest",
            f"lm_head {k}->{num_outputs}, {rows} rows",
            num_bytes=4 * (k * num_outputs + rows * k),
            num_flops=2 * rows * k * num_outputs,
            prepare=partial(_prepare_largest, weights, rows, k),
        )


def _prepare_largest(weights: Callable[[], _Weights], rows: int, k: int) -> Prepared:
    given = weights()
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(1))

    def values(found: tuple[Tensor, Tensor]) -> Tensor:
        return found[0]

    return Prepared(
        (
            Way("c", lambda copy: given.ours[copy].largest(x), values),
            Way("c, then max", lambda copy: given.ours[copy].linear(x, None).max(dim=-1), values),
            Way("F.linear, then max", lambda copy: linear(x, given.plain[copy]).max(dim=-1), values),
        ),
        lambda: reference_linear(x, given.plain[0], None).amax(dim=-1),
        _TOLERANCE,
        len(given.plain),
    )


def _prepare(weights: Callable[[], _Weights], rows: int, k: int) -> Prepared:
    given = weights()
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(1))

    def onednn(copy: int) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, given.onednn[copy], None, "none", [], "")
        return y

    return Prepared(
        (
            Way("c", lambda copy: given.ours[copy].linear(x, None)),
            Way("onednn", onednn),
            Way("F.linear", lambda copy: linear(x, given.plain[copy])),
        ),
        partial(reference_linear, x, given.plain[0], None),
        _TOLERANCE,
        len(given.plain),
    )
