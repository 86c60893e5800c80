"""Who runs which rows: a plan's pending rows, shared out among workers so that what shares a prefix stays together.

Pure policy: it counts rows by their place in the plan's depth-first order and weighs them in tokens. Knows nothing of
processes, clocks, files or models.

Each worker has a *stretch* of the plan, of which it is leased the next few rows whenever it has room. One that has
used its stretch up takes a stretch that nobody has, or else the farther half of the largest one, cut where little is
shared. What a worker that leaves has not finished is a stretch that nobody has. The less is left, the less a worker is
leased at a time, and the fewer rows may wait with it: what it has, nobody can take from it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Places = NDArray[np.int64]  # [num_rows]: rows by their place in the plan, ascending
_NONE: Places = np.empty(0, dtype=np.int64)
# A cut is looked for so far before and behind the place of equal work, as a share of the part cut off: the farther, the
# less is shared at the best place, and the sooner one side has to take from the other again.
_SLACK = 0.5
# As long as much is left: waiting with a worker when it is leased more, and so many at a time. Fewer at a time than a
# step admits would leave a batch that fills waiting.
_MOST_AHEAD, _MOST_LEASED, _LEAST_LEASED = 64, 32, 8


@dataclass(frozen=True, slots=True)
class Portion:
    """How many rows a worker is leased at a time, at most, and how many may wait with it when it is leased more."""

    num_rows: int
    num_ahead: int

    @classmethod
    def of(cls, num_open: int, num_workers: int) -> "Portion":
        """Of a plan of which so many rows are leased to nobody."""
        if num_workers == 1:  # nobody would take anything from it
            return cls(_MOST_LEASED, _MOST_AHEAD)
        share = -(-num_open // num_workers)
        return cls(
            num_rows=max(_LEAST_LEASED, min(_MOST_LEASED, share // 2)),
            num_ahead=max(1, min(_MOST_AHEAD, share // 2)),
        )


@dataclass(slots=True)
class _Share:
    """What a worker has: its stretch, and the rows of it that it was leased and has not finished."""

    stretch: Places
    held: dict[int, None]  # places in the order in which they were leased


class Leases:
    """Every row is in one place at any time: in a stretch, with the worker that it is leased to, or finished.

    Row i shares `shared_len[i]` tokens with the row before it; `work[i]` is what else it takes, in tokens: those that
    are computed of its prompt, and its output as far as one can foresee it. The plan is cut for `num_workers`, of which
    each takes a piece when it joins; any number may join and leave. Rows to `keep_back` are nobody's: they count as
    finished, and whoever keeps them back sees to them.
    """

    def __init__(
        self,
        shared_len: NDArray[np.int32],
        work: NDArray[np.int64],
        num_workers: int,
        keep_back: Iterable[int] = (),
    ) -> None:
        assert len(shared_len) == len(work), f"{len(shared_len)} rows and {len(work)}"
        self._shared_len = shared_len
        self._work = np.maximum(work, 1)
        self._shares: dict[int, _Share] = {}
        places = np.setdiff1d(np.arange(len(work)), np.fromiter(keep_back, dtype=np.int64))
        self._num_left = len(places)
        self._free = self._cut_evenly(places, num_workers)

    @property
    def num_left(self) -> int:
        """Rows that are not finished."""
        return self._num_left

    @property
    def num_open(self) -> int:
        """Rows that were leased to nobody yet."""
        stretches = [*self._free, *(share.stretch for share in self._shares.values())]
        return sum(map(len, stretches))

    @property
    def workers(self) -> tuple[int, ...]:
        """Those that have joined and not left."""
        return tuple(self._shares)

    def held(self, worker: int) -> Places:
        """The rows that are leased to the worker, in the order in which they were."""
        return np.fromiter(self._shares[worker].held, dtype=np.int64)

    def stretches(self) -> Mapping[int, Places]:
        """What each worker is to run and was not leased yet."""
        return {worker: share.stretch for worker, share in self._shares.items()}

    def join(self, worker: int) -> None:
        """A worker that may be leased rows from now on."""
        assert worker not in self._shares, f"worker {worker} has joined before"
        self._shares[worker] = _Share(_NONE, {})

    def take(self, worker: int, num_rows: int) -> Places:
        """Leases the worker its next rows, at most so many; none when there are none that it had better run."""
        share = self._shares[worker]
        if not len(share.stretch):
            share.stretch = self._find_stretch()
        taken, share.stretch = share.stretch[:num_rows], share.stretch[num_rows:]
        share.held.update(dict.fromkeys(taken.tolist()))
        return taken

    def finish(self, worker: int, places: Iterable[int]) -> None:
        """These rows, which the worker was leased, are answered."""
        share = self._shares[worker]
        for place in places:
            del share.held[place]
            self._num_left -= 1

    def leave(self, worker: int, keep_back: Iterable[int] = ()) -> Places:
        """The worker is gone: what it has not finished goes to others, except `keep_back`; returns the rows it held."""
        share, kept = self._shares.pop(worker), {*keep_back}
        held = np.sort(np.fromiter(share.held, dtype=np.int64))
        self._num_left -= len(kept)
        returned = np.fromiter((place for place in held.tolist() if place not in kept), dtype=np.int64)
        left = np.concatenate([returned, share.stretch])
        if len(left):
            self._free.append(np.sort(left))
        return held

    def _find_stretch(self) -> Places:
        """The largest that nobody has; else a part of the largest that somebody has, if that is worth it."""
        if self._free:
            found = max(range(len(self._free)), key=lambda at: self._work_of(self._free[at]))
            return self._free.pop(found)
        for owner in sorted(self._shares.values(), key=lambda share: self._work_of(share.stretch), reverse=True):
            stretch = owner.stretch
            if not len(stretch):
                break
            cut = self._cut(stretch, 2) if len(stretch) > 1 else 0
            # The beginning of the part is computed again: not if that is most of its work.
            if self._shared_len[stretch[cut]] <= self._work_of(stretch[cut:]):
                owner.stretch = stretch[:cut]
                return stretch[cut:]
        return _NONE

    def _cut_evenly(self, stretch: Places, num_parts: int) -> list[Places]:
        """At most so many parts of about equal work."""
        parts = []
        for left in range(num_parts, 1, -1):
            if len(stretch) < 2:
                break
            cut = self._cut(stretch, left)
            parts.append(stretch[:cut])
            stretch = stretch[cut:]
        return [*parts, stretch] if len(stretch) else parts

    def _cut(self, stretch: Places, parts: int) -> int:
        """Where to cut off the first of `parts` equal parts, about, between two rows: the index of the next row.

        Within the slack where the least is shared, and of such places the nearest.
        """
        done = np.cumsum(self._work[stretch])
        wanted = float(done[-1]) / parts
        distance = np.abs(done[:-1] - wanted)  # of a cut before the rows at index 1, 2, …
        is_near = distance <= max(_SLACK * wanted, float(distance.min()))
        shared = np.where(is_near, self._shared_len[stretch[1:]], np.iinfo(np.int32).max)
        return 1 + int(np.lexsort((distance, shared))[0])

    def _work_of(self, stretch: Places) -> int:
        return int(self._work[stretch].sum())

    def check(self) -> None:
        """States every invariant; for tests."""
        parts = [*self._free]
        for share in self._shares.values():
            parts += [share.stretch, np.fromiter(share.held, dtype=np.int64)]
        left = np.concatenate([_NONE, *parts])
        assert len(np.unique(left)) == len(left), f"rows in two places: {left}"
        assert len(left) == self._num_left, f"{len(left)} rows, not {self._num_left}"
        assert all(np.all(np.diff(part) > 0) for part in (*self._free, *self.stretches().values())), "out of order"
