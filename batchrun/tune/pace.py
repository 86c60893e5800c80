"""How long an engine takes for so many tokens, learned from samples of a plan that went through the real scheduler.

Samples of growing sizes, since the first rows fill the batch and the last ones leave it empty; of each size several
from all over the plan, whose spread says how far the rate may be off.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from batchrun.engine.request import Request
from batchrun.engine.step_time import StepSize
from batchrun.tune.imagined import Device, ExpectedRows, Imagined, make_engine, steps

if TYPE_CHECKING:
    from batchrun.job import Job
    from batchrun.plan.plan import Plan

_NUM_SAMPLES = 4  # of each size
_STUDENT_T = 3.18  # of four samples, for nineteen times out of twenty
_STRETCH = 256  # neighbouring rows, which share what neighbours share
# The sizes of samples, in batches.
_BATCHES = (1 / 16, 1 / 4, 1, 2, 4)
_MOST_OUTPUT = 60_000  # tokens of a sample; what lasts longer is followed for a while only


@dataclass(frozen=True, slots=True)
class Sample:
    """A sample's tokens and seconds, the seconds a token in its middle, where the batch is full, and those a step."""

    num_rows: int
    tokens: int
    seconds: float
    steady_s: float
    step_s: float
    are_lengths_known: bool


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds for tokens to compute. `error` is a share of them, `num_rows` those that were sampled."""

    tokens: tuple[float, ...]
    seconds: tuple[float, ...]
    steady_s: float  # a token, beyond the largest sample
    step_s: float  # a step of a full batch, about
    lone_s: float  # a token of a row that runs alone
    batch: int  # rows that run at a time
    error: float
    num_rows: int
    are_lengths_known: bool

    def of(self, num_tokens: float) -> float:
        """From the first step to the last."""
        beyond = max(0.0, num_tokens - self.tokens[-1])
        return float(np.interp(num_tokens, (0.0, *self.tokens), (0.0, *self.seconds))) + beyond * self.steady_s


def learn(job: "Job", plan: "Plan", device: Device) -> Pace:
    """Takes some seconds, and memory for the rows that run at a time. The same arguments give the same pace."""
    summary, batch = plan.summary, _batch(job, plan, device)
    by_size = [
        [_run(job, plan, device, places) for places in _samples(summary.num_unique, size)]
        for size in _sizes(batch, summary.num_unique)
    ]
    steady = [sample.steady_s for sample in by_size[-1]]
    context = summary.prompt_tokens // summary.num_unique
    return Pace(
        tokens=tuple(fmean(one.tokens for one in samples) for samples in by_size),
        seconds=tuple(fmean(one.seconds for one in samples) for samples in by_size),
        steady_s=fmean(steady),
        step_s=fmean(one.step_s for one in by_size[-1]),
        lone_s=device.times.seconds(StepSize(1, 1, 1, context, context)),
        batch=batch,
        error=_STUDENT_T * stdev(steady) / sqrt(len(steady)) / fmean(steady),
        num_rows=sum(one.num_rows for samples in by_size for one in samples),
        are_lengths_known=all(one.are_lengths_known for samples in by_size for one in samples),
    )


def _batch(job: "Job", plan: "Plan", device: Device) -> int:
    """Rows that run at a time."""
    runner = Imagined(job, device, plan.summary.longest_len)
    return make_engine(job, plan.summary, runner).scheduler.config.max_num_seqs


def _sizes(batch: int, num_rows: int) -> list[int]:
    """Of the samples, in rows: from one on to several batches, or as many as there are."""
    # What does not fit the first batch waits for its rows to end.
    sizes = [1, batch + 1, *(max(1, round(share * batch)) for share in _BATCHES)]
    return sorted({min(size, num_rows) for size in sizes})


def _samples(num_rows: int, size: int) -> Iterator[NDArray[np.int64]]:
    """Places of the plan for so many samples of this size, each in stretches at equal distances from all over it."""
    num_stretches = -(-size // _STRETCH)
    length = size // num_stretches
    starts = np.linspace(0, num_rows - length, _NUM_SAMPLES * num_stretches).astype(np.int64)
    for number in range(_NUM_SAMPLES):
        yield np.unique(starts[number::_NUM_SAMPLES, None] + np.arange(length))


def _run(job: "Job", plan: "Plan", device: Device, places: NDArray[np.int64]) -> Sample:
    """Lets an engine do these rows, or as many of their tokens as there is time for."""
    runner = Imagined(job, device, plan.summary.longest_len)
    engine = make_engine(job, plan.summary, runner)
    rows = ExpectedRows(job.sampling, plan.summary.longest_len)
    requests = list(rows.requests(plan, places))
    computed, ends = [0], [0.0]
    for _ in steps(engine, iter(requests)):
        counters = engine.statistics().counters
        computed.append(counters.computed_tokens - counters.recomputed_tokens)
        ends.append(runner.now_s)
        if counters.output_tokens >= _MOST_OUTPUT:
            break
    done = computed[-1]
    middle = np.interp([done / 8, done * 7 / 8], computed, ends)
    tokens = _tokens(requests, shares_prefixes=engine.scheduler.config.shares_prefixes) if engine.has_work else done
    return Sample(
        num_rows=len(requests),
        tokens=tokens,
        seconds=ends[-1] * tokens / done,
        steady_s=float(middle[1] - middle[0]) / (done * 3 / 4),
        step_s=ends[-1] / (len(ends) - 1),
        are_lengths_known=rows.are_lengths_known,
    )


def _tokens(requests: Sequence[Request], *, shares_prefixes: bool) -> int:
    """To compute of them; the last one of a row never is."""
    shared = sum(request.keep_len for request in requests[:-1]) if shares_prefixes else 0
    return sum(len(one.token_ids) + one.sampling.max_tokens - 1 for one in requests) - shared
