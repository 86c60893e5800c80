"""How long a plan will run: its rows go through the real scheduler, on a runner that computes nothing and whose clock
goes on by what each step would have taken.

A large plan is sampled: stretches of rows from all over it, one after another, and the result scaled by the work.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from batchrun.plan.plan import Plan, PlanSummary
from batchrun.tune.imagined import ExpectedRows, Imagined, make_engine, steps
from batchrun.tune.profile import Profile, as_tuned

if TYPE_CHECKING:
    from batchrun.job import Job

# Simulating takes some 30 microseconds for an output token, and as much as for so many for a row and for its prompt.
_MOST_WORK = 60_000
_WORK_OF_A_ROW = 16
_PROMPT_TOKENS_OF_WORK = 32
_STRETCH = 256  # neighbouring rows, which share what neighbours share


@dataclass(frozen=True, slots=True)
class Estimate:
    """What running a plan is expected to take, its outputs being of the expected length; times are in seconds.

    `at_most_s` is the time with every output as long as it may be: the same where `are_lengths_known`, because no
    output can end before. `num_simulated` rows stand for all. `start_s` is what one engine's job takes beside it,
    from its command to its result.
    """

    run_s: float
    at_most_s: float
    start_s: float
    are_lengths_known: bool
    steps: int
    computed_tokens: int
    output_tokens: int
    peak_kv_bytes: int
    num_simulated: int
    label: str  # of the profile


def estimate(job: "Job", plan: Plan, profile: Profile) -> Estimate:
    """What the plan will take by a profile of the job's model and machine. The same arguments give the same estimate.

    Takes a few seconds at most, and memory for the rows that run at a time.
    """
    tuned = as_tuned(job, profile)
    expected = _simulate(tuned, plan, profile, is_longest=False)
    longest = expected if expected.are_lengths_known else _simulate(tuned, plan, profile, is_longest=True)
    return Estimate(
        run_s=expected.scale * expected.run_s,
        at_most_s=longest.scale * longest.run_s,
        start_s=profile.start_s(1),
        are_lengths_known=expected.are_lengths_known,
        steps=round(expected.scale * expected.num_steps),
        computed_tokens=round(expected.scale * expected.num_computed),
        output_tokens=round(expected.output_tokens),
        peak_kv_bytes=expected.peak_kv_bytes,
        num_simulated=expected.num_rows,
        label=profile.label,
    )


@dataclass(frozen=True, slots=True)
class _Simulated:
    """A run of the plan's rows, or of a sample of them; `scale` times that is the whole. `output_tokens` are all."""

    run_s: float
    num_steps: int
    num_computed: int
    num_rows: int
    peak_kv_bytes: int
    output_tokens: float
    are_lengths_known: bool
    scale: float


def _simulate(job: "Job", plan: Plan, profile: Profile, *, is_longest: bool) -> _Simulated:
    summary = plan.summary
    runner = Imagined(job, profile, summary.longest_len)
    engine = make_engine(job, summary, runner)
    rows = ExpectedRows(job.sampling, summary.longest_len, is_longest=is_longest)
    peak = 0.0
    for _ in steps(engine, rows.requests(plan, _stretches(summary))):
        peak = max(peak, engine.statistics().kv_usage)
        if engine.statistics().counters.output_tokens >= 2 * _MOST_WORK:
            break
    counters = engine.statistics().counters
    num_computed = counters.computed_tokens - counters.recomputed_tokens
    outputs = summary.max_tokens_total * rows.output_tokens / max(rows.longest_tokens, 1)
    is_whole = rows.num_rows == summary.num_unique and not engine.has_work
    # The last token of a row is never computed.
    work = summary.unique_prompt_tokens + outputs - summary.num_unique
    return _Simulated(
        run_s=runner.now_s,
        num_steps=counters.steps,
        num_computed=num_computed,
        num_rows=rows.num_rows,
        peak_kv_bytes=round(peak * runner.num_blocks) * runner.block_bytes,
        output_tokens=outputs,
        are_lengths_known=rows.are_lengths_known,
        scale=1.0 if is_whole else work / max(num_computed, 1),
    )


def _stretches(summary: PlanSummary) -> NDArray[np.int64]:
    """Which of the plan's rows to simulate, by their place in it: all, or stretches at equal distances."""
    num = summary.num_unique
    work = _WORK_OF_A_ROW * num + summary.max_tokens_total + summary.prompt_tokens // _PROMPT_TOKENS_OF_WORK
    num_stretches = max(2, _MOST_WORK * num // (work * _STRETCH)) if num else 0
    if num <= num_stretches * _STRETCH:
        return np.arange(num)
    starts = np.linspace(0, num - _STRETCH, num_stretches).astype(np.int64)
    return np.unique(starts[:, None] + np.arange(_STRETCH))
