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
from batchrun.leases import Leases
from batchrun.tune.imagined import Device, Imagined, make_engine
from batchrun.tune.pace import Pace
from batchrun.tune.slices import Slices

if TYPE_CHECKING:
    from batchrun.job import Job
    from batchrun.plan.plan import PlanSummary

# As workers have them: so many may wait in an engine when it asks for more, and so many it is leased at a time.
_ROWS_AHEAD = 64
_ROWS_OF_A_LEASE = 32


class Hand(Protocol):
    """A worker of the simulation."""

    @property
    def now_s(self) -> float:
        """Its clock, in seconds."""

    @property
    def room(self) -> int:
        """How much it would ask for now: rows, or slices of them."""

    @property
    def has_work(self) -> bool: ...

    def give(self, places: NDArray[np.int64]) -> None:
        """Leases it what is at these places."""

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
        if hand.room and not is_last[number]:
            places = leases.take(number, hand.room)
            leases.finish(number, places.tolist())
            is_last[number] = not len(places)
            hand.give(places)
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

    def __init__(self, job: "Job", summary: "PlanSummary", device: Device, rows: Sequence[Request]) -> None:
        self._rows = rows
        self._runner = Imagined(job, device, summary.longest_len)
        self._engine = make_engine(job, summary, self._runner)

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
    def room(self) -> int:
        return _ROWS_OF_A_LEASE if self._engine.num_waiting <= _ROWS_AHEAD else 0

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    def give(self, places: NDArray[np.int64]) -> None:
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
        rows_a_slice = int(slices.num_rows[0])
        self._most = -(-_ROWS_OF_A_LEASE // rows_a_slice)
        # It has room again when so much of it is left: what waits, and half of what runs.
        prompt, output = (float(work.mean()) / rows_a_slice for work in (slices.prompt_work, slices.output_work))
        self._lead_s = pace.of((_ROWS_AHEAD + pace.batch / 2) * (prompt + output))
        self._ahead_tokens = _ROWS_AHEAD * prompt
        self._last: int | None = None  # slice it was given
        self._began_s = self._ends_s = self._asks_s = 0.0
        self._tokens = self._prompt_tokens = 0  # since it began, without a pause

    @property
    def room(self) -> int:
        return self._most if self.now_s >= self._asks_s else 0

    @property
    def has_work(self) -> bool:
        return self.now_s < self._ends_s

    def give(self, places: NDArray[np.int64]) -> None:
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
        waiting_s = self._pace.steady_s * max(0.0, self._prompt_tokens - self._ahead_tokens)
        asks_s = max(self._ends_s - self._lead_s, self._began_s + waiting_s, self.now_s + self._pace.step_s)
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
