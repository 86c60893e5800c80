"""What several workers make of a plan: each an engine of its own that shares nothing with the others, all leased their
rows by the policy that shares them out in a real run.

Knows clocks that go on by themselves, and no machine. The worker that is behind always goes first, so that rows are
leased in the order in which workers would ask for them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from statistics import fmean
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from batchrun.engine.request import Request
from batchrun.leases import Leases, Portion
from batchrun.tune.imagined import Device, Imagined, make_engine
from batchrun.tune.pace import Pace
from batchrun.tune.slices import Slices

if TYPE_CHECKING:
    from batchrun.job import Job
    from batchrun.plan.plan import PlanSummary


class Hand(Protocol):
    """A worker of the simulation."""

    @property
    def now_s(self) -> float:
        """Its clock, in seconds."""

    @property
    def rows_a_place(self) -> int:
        """Of the plan: 1, or as many as a slice has."""

    @property
    def has_room(self) -> bool:
        """Whether it would ask for more now."""

    @property
    def has_work(self) -> bool: ...

    def give(self, places: NDArray[np.int64], num_ahead: int) -> None:
        """Leases it what is at these places; it has room again when so many rows wait."""

    def advance(self, *, is_last: bool) -> None:
        """Lets its clock go on, to where it may have room; `is_last`: it will be given nothing any more."""

    @property
    def cached_tokens(self) -> int:
        """Of prompts, found in its own pool."""

    @property
    def computed_tokens(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Shift:
    """What a number of workers did; seconds from the first step of the first to the last of each, and tokens."""

    seconds: tuple[float, ...]
    cached_tokens: int
    computed_tokens: int

    @property
    def longest_s(self) -> float:
        return max(self.seconds)

    @property
    def imbalance(self) -> float:
        """The longest worker's time over the mean."""
        mean = fmean(self.seconds)
        return self.longest_s / mean if mean else 1.0


def work(hands: Sequence[Hand], leases: Leases) -> Shift:
    """Lets the workers do all that `leases` has."""
    for number in range(len(hands)):
        leases.join(number)
    # A worker's number is of use in a tie only.
    behind = [(hand.now_s, number) for number, hand in enumerate(hands)]
    heapify(behind)
    is_last = [False] * len(hands)
    while behind:
        number = behind[0][1]
        hand = hands[number]
        if hand.has_room and not is_last[number]:
            portion = Portion.of(leases.num_open * hand.rows_a_place, len(hands))
            places = leases.take(number, -(-portion.num_rows // hand.rows_a_place))
            leases.finish(number, places.tolist())
            is_last[number] = not len(places)
            hand.give(places, portion.num_ahead)
        if hand.has_work:
            hand.advance(is_last=is_last[number])
            heapreplace(behind, (hand.now_s, number))
        else:
            heappop(behind)
    return Shift(
        seconds=tuple(hand.now_s for hand in hands),
        cached_tokens=sum(hand.cached_tokens for hand in hands),
        computed_tokens=sum(hand.computed_tokens for hand in hands),
    )


class EngineHand:
    """A worker with a whole engine; `rows` are all of the plan, in its order."""

    rows_a_place = 1

    def __init__(self, job: "Job", summary: "PlanSummary", device: Device, rows: Sequence[Request]) -> None:
        self._rows = rows
        self._runner = Imagined(job, device, summary.longest_len)
        self._engine = make_engine(job, summary, self._runner)
        self._num_ahead = 1

    @property
    def now_s(self) -> float:
        return self._runner.now_s

    @property
    def cached_tokens(self) -> int:
        return self._engine.statistics().counters.cached_tokens

    @property
    def computed_tokens(self) -> int:
        return self._engine.statistics().counters.computed_tokens

    @property
    def has_room(self) -> bool:
        return self._engine.num_waiting < self._num_ahead

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    def give(self, places: NDArray[np.int64], num_ahead: int) -> None:
        self._num_ahead = num_ahead
        for place in places.tolist():
            self._engine.add(self._rows[place])

    def advance(self, *, is_last: bool) -> None:
        self._engine.step()


class PacedHand:
    """A worker of which no more is known than what it has to compute and the pace of such engines."""

    def __init__(self, slices: Slices, pace: Pace, *, shares_prefixes: bool) -> None:
        self.now_s = 0.0
        self.cached_tokens = self.computed_tokens = 0
        self._slices = slices
        self._pace = pace
        self._shares_prefixes = shares_prefixes
        self.rows_a_place = int(slices.num_rows[0])
        # Tokens of a row.
        self._prompt, self._output = (
            float(work.mean()) / self.rows_a_place for work in (slices.prompt_work, slices.output_work)
        )
        self._last: int | None = None  # slice it was given
        self._began_s = self._ends_s = self._asks_s = 0.0
        self._tokens = self._prompt_tokens = 0  # since it began, without a pause

    @property
    def has_room(self) -> bool:
        return self.now_s >= self._asks_s

    @property
    def has_work(self) -> bool:
        return self.now_s < self._ends_s

    def give(self, places: NDArray[np.int64], num_ahead: int) -> None:
        if not len(places):
            return
        slices = self._slices
        prompt_tokens = whole = int(slices.prompt_tokens[places].sum())
        if self._shares_prefixes:
            prompt_tokens = int(slices.prompt_work[places].sum()) + self._lost(int(places[0]))
        tokens = prompt_tokens + int(slices.output_work[places].sum())
        self.cached_tokens += whole - prompt_tokens
        self.computed_tokens += tokens
        if not self.has_work:
            self._began_s, self._tokens, self._prompt_tokens = self.now_s, 0, 0
        self._tokens += tokens
        self._prompt_tokens += prompt_tokens
        longest_s = int(slices.longest_output[places].max()) * self._pace.lone_s
        self._ends_s = max(self._ends_s, self._began_s + self._pace.of(self._tokens), self.now_s + longest_s)
        # A lease a step at most, and so many rows wait that are computed one after the other.
        waiting_s = self._pace.steady_s * max(0.0, self._prompt_tokens - num_ahead * self._prompt)
        # What waits is left then, and half of what runs.
        lead_s = self._pace.of((num_ahead + self._pace.batch / 2) * (self._prompt + self._output))
        asks_s = max(self._ends_s - lead_s, self._began_s + waiting_s, self.now_s + self._pace.step_s)
        self._asks_s = min(asks_s, self._ends_s)
        self._last = int(places[-1])

    def advance(self, *, is_last: bool) -> None:
        self.now_s = self._ends_s if is_last else self._asks_s

    def _lost(self, first: int) -> int:
        """Tokens that the first row shares with the row before it in the plan, but with none that this worker has."""
        slices, last = self._slices, self._last
        shared_len = int(slices.shared_len[first])
        if last is None:
            return shared_len
        between = slices.least_shared[min(first, last) + 1 : max(first, last)]
        return shared_len - min(shared_len, int(between.min(initial=shared_len)))
