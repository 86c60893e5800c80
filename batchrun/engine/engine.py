"""The loop: schedule a step, launch it, take in the tokens of the one before. One engine per device.

Where a device computes on its own, the host schedules the next step meanwhile; elsewhere a step is waited for at once.
Knows requests and completions; nothing of Parquet, prompts' text or the job folder.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from batchrun.engine.isolation import find_culprits
from batchrun.engine.request import Completion, Request, SamplingParams
from batchrun.engine.scheduler import Scheduler, SchedulerConfig
from batchrun.engine.sequence import Sequence
from batchrun.engine.statistics import Statistics
from batchrun.engine.step import Launched, Runner, ScheduledBatch
from batchrun.engine.stop import Decode, StopStrings
from batchrun.engine.stopwatch import Stopwatch
from batchrun.errors import BatchrunError, EngineFailed, RowError
from batchrun.latency import Latencies, RowTime

_log = logging.getLogger(__name__)
# From then on it is the engine that fails: so many rows that fail alone, one after another and no step between them, or
# so many failures that no row has alone, with fewer steps than these between them, or nothing gained.
_MOST_FALLEN, _MOST_UNEXPLAINED, _FORGETS_AFTER = 8, 3, 100


_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class InFlight:
    """A row that is not finished, and the tokens it has generated so far."""

    row_idx: int
    output_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Flight:
    """A launched step whose tokens have not been taken in."""

    batch: ScheduledBatch
    launched: Launched
    began: float


class _StepFailed(Exception):
    """A runner raised `cause`, which may be a row's fault."""

    def __init__(self, cause: Exception) -> None:
        super().__init__()
        self.cause = cause


class Engine:
    """Runs requests to completion by continuous batching.

    A step that fails is tried again in parts: rows that fail alone end with an `engine_error`, the others go on.

    `decode` turns output ids into text, for stop strings. `clock` measures latencies, and the costs that
    choose the way of a preemption; it never changes a row's tokens.
    """

    def __init__(
        self, config: SchedulerConfig, runner: Runner, decode: Decode, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.scheduler = Scheduler(config)
        self._runner = runner
        self._stops = StopStrings(decode)
        self._clock = clock
        self.busy_elsewhere_s = 0.0  # processor time that another process has spent for this engine
        self._stopwatch = Stopwatch()
        self._flight: _Flight | None = None
        self._last_ended = -math.inf
        self._ended: list[Completion] = []
        self._num_worked = 0  # steps since the last failure
        self._num_fallen = 0
        self._num_unexplained = 0
        self._gained_before = 0  # when the last step failed

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._flight is not None

    @property
    def num_waiting(self) -> int:
        return self.scheduler.admission.num_waiting

    @property
    def capacity(self) -> int:
        """Tokens that the KV pool can hold."""
        return self.scheduler.capacity

    def most_tokens(self, request: Request) -> int:
        """Tokens of the KV pool that a row takes at most, with all its beams; must not exceed `capacity`."""
        return self.scheduler.most_tokens(request)

    def add(self, request: Request) -> None:
        """Queues a row behind those added before; plan order makes prefixes shared."""
        self.scheduler.add(request)
        self._stopwatch.arrive(request, self._clock())

    def mean_output_len(self, sampling: SamplingParams) -> float:
        """Tokens that a row is expected to generate, by what the finished ones did."""
        return self.scheduler.lengths.mean(sampling)

    def step(self) -> list[Completion]:
        """Launches a forward pass over whatever can be scheduled; the rows that are known to be finished.

        With a runner that overlaps these are the rows of the step before.

        Raises:
            EngineFailed: steps fail, and not because of some of their rows.
        """
        try:
            self._advance()
        except _StepFailed as failed:
            self._recover(failed.cause)
        ended, self._ended = self._ended, []
        now = self._clock()
        for completion in ended:
            self._stops.forget(completion.row_idx)
            self._stopwatch.finish(completion, now)
        return ended

    def _advance(self) -> None:
        if self._flight is not None and (self.scheduler.needs_known_tokens or not self.scheduler.has_work):
            self._land()
        if not self.scheduler.has_work:
            return
        batch = self.scheduler.schedule()
        began = self._clock()
        self._stopwatch.begin(batch, began)
        following = None if batch.is_empty else _Flight(batch, _tried(lambda: self._runner.launch(batch)), began)
        if self._flight is not None:
            self._land()
        self._flight = following
        if self._flight is not None and not self._runner.overlaps:
            self._land()

    def _land(self) -> None:
        """Waits for the step in flight and takes its tokens in."""
        flight, self._flight = self._flight, None
        assert flight is not None, "nothing to wait for"
        sampled = _tried(flight.launched.wait)
        now = self._clock()
        # A device begins a step when it has ended the one before, however early it was launched.
        elapsed, self._last_ended = now - max(flight.began, self._last_ended), now
        computing = elapsed if self._runner.overlaps else elapsed - sampled.swap_seconds
        self.scheduler.costs.observe_compute(flight.batch.num_tokens, computing)
        self.scheduler.costs.observe_swap(sampled.swap_bytes, sampled.swap_seconds)
        self._ended += self.scheduler.update(flight.batch, sampled, self._stops.find)
        self._stopwatch.end(flight.batch, now)
        self._num_worked += 1
        self._num_fallen = 0

    def _recover(self, error: Exception) -> None:
        """Ends the rows that a step fails with, and has the others computed again."""
        if self._flight is not None:
            # What the step before it has sampled may be what it fails behind.
            with suppress(_StepFailed):
                self._land()
        begun = self.scheduler.start_over()
        rows = _rows_of(begun)
        reason = _in_a_line(error)
        _log.warning("a step failed (%s); looking for the row among %d", reason, len(rows), exc_info=error)
        found = find_culprits(self.scheduler.config, self._runner, begun)
        culprits = {culprit.sequence.request.key: culprit for culprit in found}  # of a row's beams one is enough
        fallen = _rows_of(culprit.sequence for culprit in culprits.values())
        self._num_fallen += len(fallen)
        is_new = bool(culprits) or (self._num_worked >= _FORGETS_AFTER and self._gained > self._gained_before)
        self._num_unexplained = (0 if is_new else self._num_unexplained) + (not culprits)
        self._num_worked, self._gained_before = 0, self._gained
        if self._num_unexplained == _MOST_UNEXPLAINED:
            raise EngineFailed(f"steps fail again and again, and no row fails alone: {reason}", rows) from error
        if len(fallen) == len(rows) and (len(rows) > 1 or self._num_fallen >= _MOST_FALLEN):
            raise EngineFailed(f"no row can be computed any more: {reason}", rows) from error
        for culprit in culprits.values():
            message = f"the engine fails on this row: {_in_a_line(culprit.error)}"
            self._ended.append(self.scheduler.fail(culprit.sequence, RowError("engine_error", message)))

    @property
    def _gained(self) -> int:
        """Rows and tokens that no failure can take back."""
        return self.scheduler.counters.rows_finished + self.scheduler.counters.output_tokens

    def stop_admitting(self) -> tuple[Request, ...]:
        """Forgets the waiting rows, which nobody has begun; they are returned."""
        requests = self.scheduler.admission.close()
        for request in requests:
            self._stopwatch.forget(request.key)
        return requests

    def in_flight(self) -> tuple[InFlight, ...]:
        """Rows that have begun and not finished."""
        begun = self.scheduler.begun
        return tuple(InFlight(sequence.request.row_idx, tuple(sequence.output_ids.tolist())) for sequence in begun)

    @property
    def description(self) -> str:
        """What runs and waits, in a line."""
        return self.scheduler.description

    def statistics(self) -> Statistics:
        return self.scheduler.statistics()

    def latencies(self) -> Latencies:
        """What rows have waited for their tokens; a snapshot."""
        return self._stopwatch.latencies

    def slowest_rows(self) -> tuple[RowTime, ...]:
        """The finished rows that took longest; the slowest first."""
        return self._stopwatch.slowest

    def check(self) -> None:
        """States every invariant between two steps; for tests."""
        self.scheduler.check()


def _tried(compute: Callable[[], _Result]) -> _Result:
    """Raises _StepFailed for what may be a row's fault; a BatchrunError is not."""
    try:
        return compute()
    except BatchrunError:
        raise
    except Exception as error:
        raise _StepFailed(error) from error


def _rows_of(sequences: Iterable[Sequence]) -> tuple[int, ...]:
    """The rows of sequences, of which a row may have several; each once."""
    return tuple(dict.fromkeys(sequence.request.row_idx for sequence in sequences))


def _in_a_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
