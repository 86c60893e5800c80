"""Rows that workers were lost with: each runs last and alone, since it may be what they fell over.

Knows rows by number and by their place in the plan; neither who tells it, nor where it is written down.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from batchrun.leases import Places


class Suspicion:
    """Every suspect waits for a worker that has nothing else, or runs alone on one, or is answered."""

    def __init__(self, num_given_up: Mapping[int, int], place_of: Callable[[int], int | None]) -> None:
        """`num_given_up` processes have ended with a row, by its number; `place_of` a row that is done is None."""
        self._num_given_up = dict(num_given_up)
        places = map(place_of, self._num_given_up)
        self._waiting = deque(sorted(place for place in places if place is not None))
        self._alone: dict[int, int] = {}  # places by worker

    @property
    def num_given_up(self) -> Mapping[int, int]:
        """Workers and processes that ended with a row, by its number."""
        return self._num_given_up

    @property
    def waiting(self) -> tuple[int, ...]:
        """Places of those that no worker has, the next one first."""
        return tuple(self._waiting)

    @property
    def is_over(self) -> bool:
        """Whether every suspect is answered."""
        return not (self._waiting or self._alone)

    def blame(self, rows: Iterable[int]) -> None:
        """One more worker was lost with each of these rows."""
        for row in rows:
            self._num_given_up[row] = self._num_given_up.get(row, 0) + 1

    def is_with(self, worker: int) -> bool:
        """Whether the worker runs one, and is to be given nothing beside."""
        return worker in self._alone

    def take(self, worker: int) -> Places:
        """The next one, if any waits, for a worker that has nothing else."""
        if not self._waiting:
            return np.empty(0, dtype=np.int64)
        self._alone[worker] = self._waiting.popleft()
        return np.array([self._alone[worker]])

    def acquit(self, worker: int, places: Iterable[int]) -> list[int]:
        """The worker has answered the rows at these places; returns those that were no suspects."""
        alone, answered = self._alone.get(worker), [*places]
        if alone in answered:
            answered.remove(alone)
            del self._alone[worker]
        return answered

    def leave(self, worker: int, places: Iterable[int]) -> set[int]:
        """The worker is gone, and the rows that it held at these places, and one that it ran alone, wait; returns the
        places of new suspects."""
        alone = {self._alone.pop(worker)} if worker in self._alone else set()
        suspects = {*places} | alone
        self._waiting.extend(sorted(suspects))
        return suspects - alone
