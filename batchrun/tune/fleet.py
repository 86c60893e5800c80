"""What a plan takes on so many workers: time, cost, and what it costs that they share nothing.

A small plan goes row by row through the real scheduler of every worker. Of a large one, samples do, and workers then go
through sums over slices of the plan at the pace that was learned.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from batchrun.leases import Leases
from batchrun.plan.sharing import decide
from batchrun.tune.hands import EngineHand, PacedHand, Shift, work
from batchrun.tune.imagined import Device, ExpectedRows, Outputs
from batchrun.tune.pace import learn
from batchrun.tune.profile import as_tuned
from batchrun.tune.slices import read_slices

if TYPE_CHECKING:
    from batchrun.job import Job
    from batchrun.plan.plan import Plan

# As in `simulation`: what is simulated takes some 20 microseconds for each.
_MOST_WORK = 200_000
_WORK_OF_A_ROW = 16
_PROMPT_TOKENS_OF_WORK = 32
# What a pace leaves out of the time; and what more where workers have less than two batches, so that chance says who
# takes rows from whom. Held against whole simulations, it is less.
_PACE_ERROR, _FEW_ROWS_ERROR = 0.05, 0.3


@dataclass(frozen=True, slots=True)
class Crew:
    """What a plan takes so many workers. `time_s` is from the job's command, its plan being there, to its
    result, of which `start_s` is beside the engines; `cost` is None without a price.

    `hit_rate` is the share of the prompt tokens that are in a worker's pool already, `imbalance` the longest worker's
    time in the engine over the mean. `error` is what the time may be off because rows were sampled, as a share of it.
    """

    workers: int
    time_s: float
    start_s: float
    cost: float | None
    hit_rate: float
    computed_tokens: int
    imbalance: float
    error: float


@dataclass(frozen=True, slots=True)
class Fleet:
    """Crews of several sizes, for the same plan, by so many rows of it that were simulated."""

    label: str  # of the device
    are_lengths_known: bool
    is_sampled: bool
    num_simulated: int
    crews: tuple[Crew, ...]


def simulate(job: "Job", plan: "Plan", device: Device, workers: Sequence[int], cost_per_hour: float | None) -> Fleet:
    """Takes seconds for each of `workers`, and memory that does not grow with the plan's rows.

    The same arguments give the same fleet. Raises StorageFailed when the plan cannot be read.
    """
    tuned, summary = as_tuned(job, device), plan.summary
    is_small = _is_small(plan)
    simulated = _row_by_row(tuned, plan, device) if is_small else _by_samples(tuned, plan, device)
    prompt_tokens = max(summary.prompt_tokens, 1)

    def crew(num: int) -> Crew:
        shift = simulated.shift(num)
        start_s = device.start_s(num)
        time_s = start_s + shift.longest_s
        return Crew(
            workers=num,
            time_s=time_s,
            start_s=start_s,
            cost=None if cost_per_hour is None else num * time_s / 3600 * cost_per_hour,
            hit_rate=shift.cached_tokens / prompt_tokens,
            computed_tokens=shift.computed_tokens,
            imbalance=shift.imbalance,
            error=simulated.error(num),
        )

    return Fleet(
        label=device.label,
        are_lengths_known=simulated.are_lengths_known,
        is_sampled=not is_small,
        num_simulated=simulated.num_rows,
        crews=tuple(crew(num) for num in workers),
    )


@dataclass(frozen=True, slots=True)
class _Simulated:
    """How a number of workers do the plan, and what it is known from."""

    shift: Callable[[int], Shift]
    num_rows: int
    are_lengths_known: bool
    error: Callable[[int], float]


def _is_small(plan: "Plan") -> bool:
    summary = plan.summary
    outputs = summary.max_tokens_total
    work = _WORK_OF_A_ROW * summary.num_unique + outputs + summary.prompt_tokens // _PROMPT_TOKENS_OF_WORK
    return work <= _MOST_WORK


def _row_by_row(job: "Job", plan: "Plan", device: Device) -> _Simulated:
    summary = plan.summary
    rows = ExpectedRows(job.sampling, summary.longest_len)
    requests = list(rows.requests(plan, np.arange(summary.num_unique)))
    shared_len = np.array([0, *(request.keep_len for request in requests)], dtype=np.int32)[: len(requests)]
    lengths = np.array([len(one.token_ids) + one.sampling.max_tokens for one in requests], dtype=np.int64)

    def shift(num: int) -> Shift:
        hands = [EngineHand(job, summary, device, requests) for _ in range(num)]
        return work(hands, Leases(shared_len, lengths - shared_len, num))

    return _Simulated(shift, len(requests), rows.are_lengths_known, error=lambda num: 0.0)


def _by_samples(job: "Job", plan: "Plan", device: Device) -> _Simulated:
    summary = plan.summary
    outputs = Outputs(job.sampling, summary.longest_len)
    sharing = decide(job.prefix_caching, summary)
    slices, pace = read_slices(plan, outputs), learn(job, plan, device)
    shared_len = slices.shared_len.astype(np.int32)

    def shift(num: int) -> Shift:
        hands = [PacedHand(slices, pace, shares_prefixes=sharing.is_on) for _ in range(num)]
        return work(hands, Leases(shared_len, slices.prompt_work + slices.output_tokens, num))

    def error(num: int) -> float:
        return pace.error + _PACE_ERROR + _FEW_ROWS_ERROR * min(1.0, 2 * num * pace.batch / summary.num_unique)

    return _Simulated(shift, pace.num_rows, pace.are_lengths_known, error)
