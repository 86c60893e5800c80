"""An engine that computes nothing: the real scheduler, on a runner whose clock goes on by what a device would take.

Also the rows for it, whose outputs are as long as one expects; and what has to be known of a device.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from batchrun.engine.engine import Engine
from batchrun.engine.lengths import OutputLengths
from batchrun.engine.request import Request, SamplingParams, TokenIds
from batchrun.engine.step import Ended, Sampled, ScheduledBatch
from batchrun.engine.step_time import StepSize, StepTimes
from batchrun.executors import local
from batchrun.plan.params import merged
from batchrun.plan.plan import Plan, PlanSummary, Unit, read_unit
from batchrun.plan.sharing import decide
from batchrun.tune.profile import Pool

if TYPE_CHECKING:
    from batchrun.job import Job

_ROWS_AHEAD = 512  # waiting in an engine, as a worker keeps them
_SWAP_AT_MOST = 4 << 30


class Device(Protocol):
    """What a model's steps take on a device, by a profile or otherwise. Times are in seconds."""

    @property
    def label(self) -> str:
        """Where the figures are from."""

    @property
    def times(self) -> StepTimes: ...

    @property
    def bytes_per_s(self) -> float:
        """The most that is read from its memory."""

    @property
    def pool(self) -> Pool: ...

    def start_s(self, num_workers: int) -> float:
        """What a job of so many workers takes beside its engines: from its command, with the plan there, to the first
        step, and from the last one to the result."""

    @property
    def max_num_seqs(self) -> int:
        """The best size of a step, where the job names none."""

    @property
    def max_num_batched_tokens(self) -> int: ...


class Imagined:
    """Implements `Runner`: computes nothing, samples token 0, and knows the time by which a device would be done."""

    def __init__(self, job: "Job", device: Device, longest_len: int) -> None:
        """The pool is the job's where it says how large, else the device's; it holds the longest row."""
        pool = device.pool
        pool_bytes = pool.pool_bytes if job.kv_cache_memory is None else job.kv_cache_memory
        swap_space = min(_SWAP_AT_MOST, pool_bytes) if job.swap_space is None else job.swap_space
        self.block_size = job.block_size
        self.block_bytes = pool.kv_bytes_per_token * job.block_size
        self.block_format = "nothing"
        self.num_blocks = max(pool_bytes // self.block_bytes, -(-longest_len // job.block_size))
        self.num_state_slots = 0  # of models that have states nothing is known
        self.num_host_slots = swap_space // self.block_bytes
        self.is_gpu = pool.is_gpu
        self.overlaps = False
        # What guesses would come true is not known beforehand.
        self.num_free_tokens = 0
        self.now_s = 0.0
        self._times = device.times
        self._bytes_per_s = device.bytes_per_s

    def clock(self) -> float:
        return self.now_s

    def launch(self, batch: ScheduledBatch) -> Ended:
        swapped = batch.num_swapped * self.block_bytes
        swap_s = 2 * swapped / self._bytes_per_s  # read here and written there
        self.now_s += self._times.seconds(StepSize.of(batch)) + swap_s
        tokens = np.zeros(len(batch.sampled), dtype=np.int32)
        return Ended(Sampled(tokens, swap_bytes=swapped, swap_seconds=swap_s))

    def wait_for_copies(self) -> None:
        pass

    def close(self) -> None:
        """There is nothing to end."""


def make_engine(job: "Job", summary: PlanSummary, runner: Imagined) -> Engine:
    """The engine that the job would have, on this runner and its clock."""
    sharing = decide(job.prefix_caching, summary)
    config = local.configure(job, runner, (), shares_prefixes=sharing.is_on)
    return Engine(config, runner, _no_text, runner.clock)


def steps(engine: Engine, requests: Iterator[Request]) -> Iterator[None]:
    """Runs the engine until all requests are done, and comes back after each step."""
    is_all_fed = False
    while True:
        while not is_all_fed and engine.num_waiting < _ROWS_AHEAD:
            request = next(requests, None)
            if request is None:
                is_all_fed = True
            else:
                engine.add(request)
        if not engine.has_work:
            return
        engine.step()
        yield


@dataclass(frozen=True, slots=True)
class OutputLens:
    """Tokens that a row is expected to generate, and those that it may at most."""

    expected: int
    longest: int
    is_known: bool  # no output ends before


class Outputs:
    """How long the rows' outputs will be: as `max_tokens` says, where nothing ends them before, else half of it."""

    def __init__(self, base: SamplingParams, longest_len: int) -> None:
        """`base` is the job's. The longest row's length is the model's, or no row comes near to that."""
        self.room = longest_len  # for prompt and output
        self._base = base
        self._lengths = OutputLengths()
        self.of_params = functools.lru_cache(maxsize=4096)(self._of_params)

    def of(self, params: str | None, prompt_len: int) -> OutputLens:
        """Of a row with these parameters of its own."""
        lens = self.of_params(params)
        longest = min(lens.longest, self.room - prompt_len)
        return OutputLens(min(longest, lens.expected), longest, lens.is_known)

    def _of_params(self, params: str | None) -> OutputLens:
        sampling = merged(self._base, params)
        expected = self._lengths.mean(sampling)
        return OutputLens(max(1, ceil(expected)), sampling.max_tokens, expected == sampling.max_tokens)


class ExpectedRows:
    """Makes requests of planned rows that generate exactly what is expected of them, and counts what it made.

    `longest_tokens` is what the outputs could have been.
    """

    def __init__(self, base: SamplingParams, longest_len: int, *, is_longest: bool = False) -> None:
        """With `is_longest` they generate all that they may."""
        self.num_rows = 0
        self.output_tokens = self.longest_tokens = 0
        self.are_lengths_known = True
        self._outputs = Outputs(base, longest_len)
        self._is_longest = is_longest

    def requests(self, plan: Plan, wanted: NDArray[np.int64]) -> Iterator[Request]:
        """Of the rows at these places of the plan, ascending; failed rows have none."""
        first = 0
        for unit in plan.units:
            # Failed rows have no tokens and units of their own.
            if unit.num_tokens:
                begin, end = np.searchsorted(wanted, (first, first + unit.num_rows))
                positions = wanted[begin:end] - first
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
        lens = self._outputs.of(params, len(token_ids))
        num = lens.longest if self._is_longest else lens.expected
        self.are_lengths_known &= lens.is_known
        self.num_rows += 1
        self.output_tokens += num
        self.longest_tokens += lens.longest
        return Request(self.num_rows, token_ids, SamplingParams(max_tokens=num, ignore_eos=True), keep_len)


def _no_text(token_ids: TokenIds) -> str:
    raise AssertionError("no row has a stop string")
