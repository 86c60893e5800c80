"""How long a plan will run: its rows go through the real scheduler, on a runner that computes nothing and whose clock
goes on by what each step would have taken.

A large plan is sampled: stretches of rows from all over it, one after another, and the result scaled by the work.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from batchrun.engine.engine import Engine
from batchrun.engine.lengths import OutputLengths
from batchrun.engine.request import Request, SamplingParams, TokenIds
from batchrun.engine.step import Ended, Sampled, ScheduledBatch
from batchrun.engine.step_time import StepSize
from batchrun.executors import local
from batchrun.plan.params import merged
from batchrun.plan.plan import Plan, PlanSummary, Unit, read_unit
from batchrun.plan.sharing import decide
from batchrun.tune.profile import Profile, as_tuned

if TYPE_CHECKING:
    from batchrun.job import Job

_ROWS_AHEAD = 512  # waiting in the engine, as a worker keeps them
# Simulating takes some 30 microseconds for an output token, and as much as for so many for a row and for its prompt.
_MOST_WORK = 60_000
_WORK_OF_A_ROW = 16
_PROMPT_TOKENS_OF_WORK = 32
_STRETCH = 256  # neighbouring rows, which share what neighbours share
_SWAP_AT_MOST = 4 << 30


@dataclass(frozen=True, slots=True)
class Estimate:
    """What running a plan is expected to take, its outputs being of the expected length; times are in seconds.

    `at_most_s` is the time with every output as long as it may be: the same where `are_lengths_known`, because no
    output can end before. `num_simulated` rows stand for all. `load_s` comes before.
    """

    run_s: float
    at_most_s: float
    load_s: float
    are_lengths_known: bool
    steps: int
    computed_tokens: int
    output_tokens: int
    peak_kv_bytes: int
    num_simulated: int
    label: str  # of the profile


class Imagined:
    """Implements `Runner`: computes nothing, samples token 0, and knows the time by which a device would be done."""

    def __init__(self, job: "Job", profile: Profile, longest_len: int) -> None:
        """The pool is the job's where it says how large, else the one that was measured; it holds the longest row."""
        pool = profile.pool
        pool_bytes = pool.pool_bytes if job.kv_cache_memory is None else job.kv_cache_memory
        swap_space = min(_SWAP_AT_MOST, pool_bytes) if job.swap_space is None else job.swap_space
        self.block_size = job.block_size
        self.block_bytes = pool.kv_bytes_per_token * job.block_size
        self.num_blocks = max(pool_bytes // self.block_bytes, -(-longest_len // job.block_size))
        self.num_state_slots = 0  # of models that have states no profile is made
        self.num_host_slots = swap_space // self.block_bytes
        self.is_gpu = pool.is_gpu
        self.overlaps = False
        # What guesses would come true is not known beforehand.
        self.num_free_tokens = 0
        self.now_s = 0.0
        self._times = profile.times
        self._bytes_per_s = profile.bytes_per_s

    def clock(self) -> float:
        return self.now_s

    def launch(self, batch: ScheduledBatch) -> Ended:
        swapped = batch.num_swapped * self.block_bytes
        swap_s = 2 * swapped / self._bytes_per_s  # read here and written there
        self.now_s += self._times.seconds(StepSize.of(batch)) + swap_s
        tokens = np.zeros(len(batch.sampled), dtype=np.int32)
        return Ended(Sampled(tokens, swap_bytes=swapped, swap_seconds=swap_s))

    def close(self) -> None:
        pass


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
        load_s=profile.load_s,
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
    sharing = decide(job.prefix_caching, summary)
    config = local.configure(job, runner, (), shares_prefixes=sharing.is_on)
    engine = Engine(config, runner, _no_text, runner.clock)
    rows = _Rows(job.sampling, summary.longest_len, is_longest=is_longest)
    requests = rows.requests(plan)
    is_all_fed, peak = False, 0.0
    while engine.statistics().counters.output_tokens < 2 * _MOST_WORK:
        while not is_all_fed and engine.num_waiting < _ROWS_AHEAD:
            request = next(requests, None)
            if request is None:
                is_all_fed = True
            else:
                engine.add(request)
        if not engine.has_work:
            break
        engine.step()
        peak = max(peak, engine.statistics().kv_usage)
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


class _Rows:
    """Makes requests of planned rows that generate exactly what is expected of them, and counts what it made.

    `longest_tokens` is what the outputs could have been.
    """

    def __init__(self, base: SamplingParams, longest_len: int, *, is_longest: bool) -> None:
        self.num_rows = 0
        self.output_tokens = self.longest_tokens = 0
        self.are_lengths_known = True
        self._sampling = functools.lru_cache(maxsize=4096)(functools.partial(merged, base))
        self._lengths = OutputLengths()
        self._longest_len = longest_len
        self._is_longest = is_longest

    def requests(self, plan: Plan) -> Iterator[Request]:
        """Of the sampled rows, in plan order."""
        wanted, first = _stretches(plan.summary), 0
        for unit in plan.units:
            # Failed rows have no tokens and units of their own.
            if unit.num_tokens:
                positions = wanted[(wanted >= first) & (wanted < first + unit.num_rows)] - first
                first += unit.num_rows
                if len(positions):
                    yield from self._of_unit(unit, positions)

    def _of_unit(self, unit: Unit, positions: NDArray[np.int64]) -> Iterator[Request]:
        table = read_unit(unit)
        # What lies between two rows shortens the prefix that they share.
        keep_len = np.minimum.reduceat(table.column("keep_len").to_numpy(), positions)
        chosen = table.select(["token_ids", "params"]).take(positions)
        tokens = chosen.column("token_ids").combine_chunks()
        offsets, values = tokens.offsets.to_numpy(), tokens.values.to_numpy()
        for at, (params, keep) in enumerate(zip(chosen.column("params").to_pylist(), keep_len.tolist(), strict=True)):
            yield self._request(values[offsets[at] : offsets[at + 1]], params, keep)

    def _request(self, token_ids: TokenIds, params: str | None, keep_len: int) -> Request:
        sampling: SamplingParams = self._sampling(params)
        expected = self._lengths.mean(sampling)
        # The longest row's length is the model's, or no row comes near to that.
        longest = min(sampling.max_tokens, self._longest_len - len(token_ids))
        self.are_lengths_known &= expected == sampling.max_tokens
        num = longest if self._is_longest else min(longest, max(1, ceil(expected)))
        self.num_rows += 1
        self.output_tokens += num
        self.longest_tokens += longest
        return Request(self.num_rows, token_ids, SamplingParams(max_tokens=num, ignore_eos=True), keep_len)


def _stretches(summary: PlanSummary) -> NDArray[np.int64]:
    """Which of the plan's rows to simulate, by their place in it: all, or stretches at equal distances."""
    num = summary.num_unique
    work = _WORK_OF_A_ROW * num + summary.max_tokens_total + summary.prompt_tokens // _PROMPT_TOKENS_OF_WORK
    num_stretches = max(2, _MOST_WORK * num // (work * _STRETCH)) if num else 0
    if num <= num_stretches * _STRETCH:
        return np.arange(num)
    starts = np.linspace(0, num - _STRETCH, num_stretches).astype(np.int64)
    return np.unique(starts[:, None] + np.arange(_STRETCH))


def _no_text(token_ids: TokenIds) -> str:
    raise AssertionError("no row has a stop string")
