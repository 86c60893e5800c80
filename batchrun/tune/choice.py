"""How large steps should be: rows (N) and tokens (C) of a step, for what somebody waits for.

`alpha` weighs the time until a row has its first token, its wait in the queue of a job included; that wait is the
better part of it, and what shortens it is a high rate of rows. `beta` weighs the time from one token of a row to its
next, that is the length of a step. A batch job waits for its last row only, so `beta` is 0 unless somebody says so.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from batchrun.engine.step_time import StepSize, StepTimes
from batchrun.executors.local import Limits

# Rows in the queue of the job that the choice is made for.
_QUEUED_ROWS = 1000
# What is no further from the best than step times are exact is as good.
_AS_GOOD = 1.05


@dataclass(frozen=True, slots=True)
class Weights:
    """0 or more, and not both 0."""

    alpha: float = 1.0
    beta: float = 0.0


@dataclass(frozen=True, slots=True)
class TypicalRow:
    """What a job's rows are like, in tokens; prompts without what they share."""

    prompt_len: int = 256
    output_len: int = 64


@dataclass(frozen=True, slots=True)
class Prospect:
    """What limits would mean for a job of typical rows; seconds, and output tokens a second."""

    limits: Limits
    first_token_s: float
    step_s: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Choice:
    """The limits chosen, and what was compared, the usual ones first."""

    best: Prospect
    usual: Prospect
    others: tuple[Prospect, ...]


def choose(times: StepTimes, weights: Weights, row: TypicalRow, usual: Limits, candidates: Iterable[Limits]) -> Choice:
    """The limits with the least weighted time, each time relative to the least there is of it.

    The usual ones stay unless others are clearly better; of equally good ones the smallest are chosen, since they need
    the least memory.
    """
    standing = prospect(times, row, usual)
    others = tuple(prospect(times, row, limits) for limits in candidates if limits != usual)
    costs = _weighted([standing, *others], weights)
    good_enough = _AS_GOOD * min(costs)
    if costs[0] <= good_enough:
        return Choice(standing, standing, others)
    good = [other for other, cost in zip(others, costs[1:], strict=True) if cost <= good_enough]
    return Choice(min(good, key=_size), standing, others)


def candidates(*, max_rows: int, max_tokens: int) -> list[Limits]:
    """Powers of two, no larger than what was measured."""
    rows = [1 << bits for bits in range(3, max_rows.bit_length()) if 1 << bits <= max_rows]
    tokens = [1 << bits for bits in range(6, max_tokens.bit_length()) if 1 << bits <= max_tokens]
    return [Limits(num_rows, num_tokens) for num_rows in rows for num_tokens in tokens if num_rows <= num_tokens]


def prospect(times: StepTimes, row: TypicalRow, limits: Limits) -> Prospect:
    """The middle of a long job of such rows, where as many rows enter as leave."""
    prompt_len, output_len = row.prompt_len, row.output_len
    num_decoded = min(limits.max_num_seqs, limits.max_num_batched_tokens * output_len / (prompt_len + output_len))
    num_prompt = num_decoded * prompt_len / output_len
    num_entering = num_prompt / prompt_len
    size = StepSize(
        num_tokens=num_decoded + num_prompt,
        num_rows=num_decoded + max(num_entering, 1.0),
        num_sampled=num_decoded + num_entering,
        kv_tokens=num_decoded * (prompt_len + output_len / 2) + max(num_prompt, prompt_len / 2),
        pairs=num_decoded * (prompt_len + output_len / 2) + num_prompt * prompt_len / 2,
    )
    step_s = times.seconds(size)
    row_s = output_len * step_s / num_decoded
    prefill_s = max(prompt_len / num_prompt, 1.0) * step_s
    return Prospect(limits, _QUEUED_ROWS / 2 * row_s + prefill_s, step_s, num_decoded / step_s)


def _weighted(prospects: Sequence[Prospect], weights: Weights) -> list[float]:
    first_s = min(one.first_token_s for one in prospects)
    step_s = min(one.step_s for one in prospects)
    return [weights.alpha * one.first_token_s / first_s + weights.beta * one.step_s / step_s for one in prospects]


def _size(one: Prospect) -> tuple[int, int]:
    return one.limits.max_num_batched_tokens, one.limits.max_num_seqs
