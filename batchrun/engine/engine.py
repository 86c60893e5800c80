"""The loop: schedule a step, launch it, take in the tokens of the one before. One engine per device.

Where a device computes on its own, the host schedules the next step meanwhile; elsewhere a step is waited for at once.
Knows requests and completions; nothing of Parquet, prompts' text or the job folder.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from batchrun.engine.request import Completion, Request, SamplingParams
from batchrun.engine.scheduler import Scheduler, SchedulerConfig
from batchrun.engine.statistics import Statistics
from batchrun.engine.step import Launched, Runner, ScheduledBatch
from batchrun.engine.stop import Decode, StopStrings
from batchrun.engine.stopwatch import Stopwatch
from batchrun.latency import Latencies, RowTime


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


class Engine:
    """Runs requests to completion by continuous batching.

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
        self._stopwatch = Stopwatch()
        self._flight: _Flight | None = None
        self._last_ended = -math.inf

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._flight is not None

    @property
    def num_waiting(self) -> int:
        return self.scheduler.admission.num_waiting

    @property
    def capacity(self) -> int:
        """Tokens of the longest sequence that the KV pool can hold."""
        return self.scheduler.capacity

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
        """
        completions = []
        if self._flight is not None and (self.scheduler.needs_known_tokens or not self.scheduler.has_work):
            completions += self._land()
        if not self.scheduler.has_work:
            return completions
        batch = self.scheduler.schedule()
        began = self._clock()
        self._stopwatch.begin(batch, began)
        following = None if batch.is_empty else _Flight(batch, self._runner.launch(batch), began)
        if self._flight is not None:
            completions += self._land()
        self._flight = following
        if self._flight is not None and not self._runner.overlaps:
            completions += self._land()
        return completions

    def _land(self) -> list[Completion]:
        """Waits for the step in flight; the rows that it finished."""
        flight, self._flight = self._flight, None
        assert flight is not None, "nothing to wait for"
        sampled = flight.launched.wait()
        now = self._clock()
        # A device begins a step when it has ended the one before, however early it was launched.
        elapsed, self._last_ended = now - max(flight.began, self._last_ended), now
        computing = elapsed if self._runner.overlaps else elapsed - sampled.swap_seconds
        self.scheduler.costs.observe_compute(flight.batch.num_tokens, computing)
        self.scheduler.costs.observe_swap(sampled.swap_bytes, sampled.swap_seconds)
        completions = self.scheduler.update(flight.batch, sampled, self._stops.find)
        self._stopwatch.end(flight.batch, now)
        for completion in completions:
            self._stops.forget(completion.row_idx)
            self._stopwatch.finish(completion, now)
        return completions

    def stop_admitting(self) -> tuple[Request, ...]:
        """Forgets the waiting rows, which nobody has begun; they are returned."""
        requests = self.scheduler.admission.close()
        for request in requests:
            self._stopwatch.forget(request.row_idx)
        return requests

    def in_flight(self) -> tuple[InFlight, ...]:
        """Rows that have begun and not finished."""
        begun = self.scheduler.begun
        return tuple(InFlight(sequence.request.row_idx, tuple(sequence.output_ids.tolist())) for sequence in begun)

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
