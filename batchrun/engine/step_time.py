"""How long a step takes on a device: a sum of what its size costs, learned from measured steps.

Knows integers and seconds; no clock, tensor or device. Every cost is 0 or more, so that a larger step never seems
quicker. The cost of a token grows at a few numbers of tokens: below them, reading the weights hides a part of it.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from batchrun.engine.step import ScheduledBatch

TOKEN_KNEES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)
_SAMPLED_KNEES = (8, 32)

# What each cost is of, in the order of `_amounts`.
TERMS = (
    "step",
    "token",
    *(f"token_over_{knee}" for knee in TOKEN_KNEES),
    "row",
    "kv_token",
    "pair",
    "sampling",
    "sampled",
    *(f"sampled_over_{knee}" for knee in _SAMPLED_KNEES),
)


@dataclass(frozen=True, slots=True)
class StepSize:
    """What of a step takes time. The means over many steps need not be whole numbers.

    `kv_tokens` are the positions up to each row's last one, summed over rows: keys and values that are read.
    `pairs` are a computed token and a position that it attends to.
    """

    num_tokens: float
    num_rows: float
    num_sampled: float
    kv_tokens: float
    pairs: float

    @classmethod
    def of(cls, batch: ScheduledBatch) -> Self:
        num_tokens = num_sampled = kv_tokens = pairs = 0
        for item in batch.items:
            num, end = item.num_tokens, item.end
            num_tokens += num
            num_sampled += item.samples
            kv_tokens += end
            pairs += num * end - num * (num - 1) // 2
        return cls(num_tokens, len(batch.items), num_sampled, kv_tokens, pairs)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """`costs` in seconds, one for each of `TERMS`."""

    costs: tuple[float, ...]

    @classmethod
    def named(cls, costs: Mapping[str, float]) -> Self:
        """Raises ValueError when these are not the terms' costs."""
        if set(costs) != set(TERMS) or min(costs.values()) < 0:
            raise ValueError(f"costs of {', '.join(costs)} instead of {', '.join(TERMS)}, each 0 or more")
        return cls(tuple(costs[name] for name in TERMS))

    @property
    def by_name(self) -> dict[str, float]:
        return dict(zip(TERMS, self.costs, strict=True))

    def seconds(self, size: StepSize) -> float:
        """How long a step of this size takes; a step without tokens takes no time."""
        if not size.num_tokens:
            return 0.0
        return sum(cost * amount for cost, amount in zip(self.costs, _amounts(size), strict=True))


def fit(sizes: Several[StepSize], seconds: Several[float]) -> StepTimes:
    """The costs that explain measured steps best: the least sum of squares of the relative errors."""
    measured = np.array(seconds)
    amounts = np.array([_amounts(size) for size in sizes]) / measured[:, None]
    return StepTimes(tuple(non_negative_least_squares(amounts, np.ones(len(measured))).tolist()))


def relative_errors(
    times: StepTimes, sizes: Several[StepSize], seconds: Several[float]
) -> NDArray[np.float64]:  # [num_steps]
    """How far the costs are off for each step, as a share of what was measured."""
    expected = np.array([times.seconds(size) for size in sizes])
    return np.asarray(np.abs(expected / np.array(seconds) - 1))


def non_negative_least_squares(
    a: NDArray[np.float64],  # [num_equations, num_unknowns]
    b: NDArray[np.float64],  # [num_equations]
) -> NDArray[np.float64]:  # [num_unknowns]
    """x of 0 or more with the least |a x - b| (Lawson and Hanson, Solving Least Squares Problems, 1974, chapter 23)."""
    scale = np.linalg.norm(a, axis=0)
    scale[scale == 0] = 1.0
    a = a / scale
    x = np.zeros(a.shape[1])
    is_free = np.zeros(a.shape[1], dtype=bool)
    enough = 1e-10 * max(float(np.linalg.norm(b)), 1e-300)
    for _ in range(10 * a.shape[1]):
        gain = np.where(is_free, -np.inf, a.T @ (b - a @ x))
        if gain.max() <= enough:
            break
        is_free[gain.argmax()] = True
        x = _closest_feasible(a, b, x, is_free)
    return np.asarray(x / scale)


def _closest_feasible(
    a: NDArray[np.float64], b: NDArray[np.float64], x: NDArray[np.float64], is_free: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """The best x of 0 or more whose other elements are 0; takes from `is_free` those that became 0 on the way."""
    while is_free.any():
        best = np.zeros_like(x)
        best[is_free] = np.linalg.lstsq(a[:, is_free], b, rcond=None)[0]
        is_below = is_free & (best <= 0)
        if not is_below.any():
            return best
        # As far towards the best as all stay at 0 or more.
        gaps = x[is_below] - best[is_below]
        share = float(np.divide(x[is_below], gaps, out=np.zeros_like(gaps), where=gaps > 0).min())
        x = x + share * (best - x)
        is_free &= x > 1e-15
        x = np.where(is_free, x, 0.0)
    return np.zeros_like(x)


def _amounts(size: StepSize) -> list[float]:
    """How much of each of `TERMS` a step has."""
    num, num_sampled = size.num_tokens, size.num_sampled
    return [
        1.0,
        num,
        *[num - knee if num > knee else 0.0 for knee in TOKEN_KNEES],
        size.num_rows,
        size.kv_tokens,
        size.pairs,
        min(num_sampled, 1.0),
        num_sampled,
        *[num_sampled - knee if num_sampled > knee else 0.0 for knee in _SAMPLED_KNEES],
    ]
