"""Times steps on a device: each shape several times, in rounds, so that a slow spell of the machine meets all alike.

Knows a runner and a clock; nothing of models or of what the times are for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from statistics import median

from batchrun.engine.request import Request, SamplingParams
from batchrun.engine.sequence import Sequence as Row
from batchrun.engine.step import Item, Launched, Runner, ScheduledBatch
from batchrun.engine.step_time import StepSize
from batchrun.observe.events import Observe, TuneProgress
from batchrun.tune.shapes import Shape, make_batch, token_ids

_ROUNDS = 4
# By whether it is a GPU, which the first times compiles or records what it runs.
_WARMING_STEPS = {False: 0, True: 3}
# Keys and values that the measured rows are spread over: more than caches hold.
_FILLED_BYTES = {False: 1 << 29, True: 4 << 30}
_FILLED_TOKENS = 1 << 16


@dataclass(frozen=True, slots=True)
class Measured:
    """A step of this size took so long: from the end of one like it to its own end; the median of several, seconds."""

    size: StepSize
    seconds: float


class Meter:
    """Measures steps on a runner whose pool nobody else uses, and overwrites it. `clock` is in seconds."""

    def __init__(self, runner: Runner, vocab_size: int, clock: Callable[[], float], observe: Observe) -> None:
        self._runner = runner
        self._vocab_size = vocab_size
        self._clock = clock
        self._observe = observe

    def measure(self, shapes: Sequence[Shape], *, budget_s: float) -> list[Measured]:
        """The steps that can be measured in `budget_s`, the smallest at any rate; `shapes` come smallest first."""
        num_blocks = self._fill(max(shape.num_blocks(self._runner.block_size) for shape in shapes))
        batches = [self._batch(shape, num_blocks) for shape in shapes]
        times: list[list[float]] = [[] for _ in batches]
        began = self._clock()
        for number in range(_ROUNDS):
            # A device with a queue is measured with a step in front.
            num_before = self._runner.overlaps if number else _WARMING_STEPS[self._runner.is_gpu]
            for at, batch in enumerate(batches):
                left = budget_s - (self._clock() - began)
                if (1 + num_before) * _expected_s(batches, times, at) <= left:
                    times[at].append(self._periods(batch, 1 + num_before)[-1])
                self._observe(TuneProgress(number * len(batches) + at + 1, _ROUNDS * len(batches)))
        return [
            Measured(StepSize.of(batch), median(taken)) for batch, taken in zip(batches, times, strict=True) if taken
        ]

    def _batch(self, shape: Shape, num_blocks: int) -> ScheduledBatch:
        return make_batch(shape, block_size=self._runner.block_size, num_blocks=num_blocks, vocab_size=self._vocab_size)

    def _fill(self, num_wanted: int) -> int:
        """Puts a computed block's keys and values into this many, which are returned: memory that was never written
        is quick to read, and other memory may hold numbers that are slow to compute with."""
        runner = self._runner
        size = runner.block_size
        limits = (runner.num_blocks, _FILLED_BYTES[runner.is_gpu] // runner.block_bytes, _FILLED_TOKENS // size)
        num_blocks = max(1, min(num_wanted, *limits))
        row = Row(Request(0, token_ids(size, self._vocab_size), SamplingParams(max_tokens=1)), arrival=0)
        row.block_table = [0]
        copies = tuple((slot % size, slot) for slot in range(size, num_blocks * size))
        runner.launch(ScheduledBatch((Item(row, 0, size, samples=True),), slot_copies=copies)).wait()
        return num_blocks

    def _periods(self, batch: ScheduledBatch, num_steps: int) -> list[float]:
        """Seconds from end to end of the step, done so often in a row; the first from its launch.

        As in an engine, a device that computes on its own is given the next step before it has ended one.
        """
        ends = [self._clock()]
        flight: Launched | None = None
        for _ in range(num_steps):
            launched = self._runner.launch(batch)
            if flight is not None:
                flight.wait()
                ends.append(self._clock())
            flight = launched
            if not self._runner.overlaps:
                flight.wait()
                ends.append(self._clock())
                flight = None
        if flight is not None:
            flight.wait()
            ends.append(self._clock())
        return [end - before for before, end in pairwise(ends)]


def _expected_s(batches: Sequence[ScheduledBatch], times: Sequence[Sequence[float]], at: int) -> float:
    """Seconds that step `at` will take: what it took before, or else what the one before took, token for token."""
    if times[at] or not at:
        return times[at][-1] if times[at] else 0.0
    if not times[at - 1]:
        return inf
    return times[at - 1][-1] * batches[at].num_tokens / batches[at - 1].num_tokens
