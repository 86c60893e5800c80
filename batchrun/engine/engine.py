"""The loop: schedule a step, run it, take in its tokens. One engine per device.

Knows requests and completions; nothing of Parquet, prompts' text or the job folder.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from batchrun.engine.request import Completion, Request, SamplingParams
from batchrun.engine.scheduler import Scheduler, SchedulerConfig
from batchrun.engine.statistics import Statistics
from batchrun.engine.step import Runner
from batchrun.engine.stop import Decode, StopStrings


@dataclass(frozen=True, slots=True)
class InFlight:
    """A row that is not finished, and the tokens it has generated so far."""

    row_idx: int
    output_ids: tuple[int, ...]


class Engine:
    """Runs requests to completion by continuous batching.

    `decode` turns output ids into text, for stop strings. `clock` measures the costs that choose the way of a
    preemption; it never changes a row's tokens.
    """

    def __init__(
        self, config: SchedulerConfig, runner: Runner, decode: Decode, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.scheduler = Scheduler(config)
        self._runner = runner
        self._stops = StopStrings(decode)
        self._clock = clock

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting)

    @property
    def capacity(self) -> int:
        """Tokens of the longest sequence that the KV pool can hold."""
        return self.scheduler.capacity

    def add(self, request: Request) -> None:
        """Queues a row behind those added before; plan order makes prefixes shared."""
        self.scheduler.add(request)

    def mean_output_len(self, sampling: SamplingParams) -> float:
        """Tokens that a row is expected to generate, by what the finished ones did."""
        return self.scheduler.lengths.mean(sampling)

    def step(self) -> list[Completion]:
        """One forward pass over whatever is scheduled; the rows it finished."""
        batch = self.scheduler.schedule()
        began = self._clock()
        sampled = self._runner.execute(batch)
        elapsed = self._clock() - began
        self.scheduler.costs.observe_compute(batch.num_tokens, elapsed - sampled.swap_seconds)
        self.scheduler.costs.observe_swap(sampled.swap_bytes, sampled.swap_seconds)
        completions = self.scheduler.update(batch, sampled, self._stops.find)
        for completion in completions:
            self._stops.forget(completion.row_idx)
        return completions

    def stop_admitting(self) -> tuple[Request, ...]:
        """Forgets the waiting rows, which nobody has begun; they are returned."""
        waiting = tuple(self.scheduler.waiting)
        self.scheduler.waiting.clear()
        return waiting

    def in_flight(self) -> tuple[InFlight, ...]:
        """Rows that have begun and not finished."""
        sequences = [*self.scheduler.running, *self.scheduler.preempted]
        return tuple(InFlight(sequence.request.row_idx, tuple(sequence.output_ids.tolist())) for sequence in sequences)

    def statistics(self) -> Statistics:
        return self.scheduler.statistics()

    def check(self) -> None:
        """States every invariant between two steps; for tests."""
        self.scheduler.check()
