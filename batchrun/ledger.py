"""What has come of a job's rows, written into its folder: answers, tokens of unfinished rows, rows under suspicion.

The one place where a run writes them, whoever computes. Knows no engine and no worker.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TextIO

import pyarrow as pa

from batchrun.observe.events import Committed, Observe, RunBegan
from batchrun.store.store import Store
from batchrun.tally import EngineReport, Tally

_log = logging.getLogger(__name__)


class Ledger:
    """Keeps what one worker in this process, or somebody on behalf of many, hands in. `clock` is in seconds."""

    def __init__(
        self, store: Store, observe: Observe, tally: Tally, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._observe = observe
        self._tally = tally
        self._clock = clock
        self._began = clock()
        self._partial = store.load_partial()
        self.recording_s = 0.0  # spent on saying how it goes: progress, series and metrics

    @property
    def partial(self) -> Mapping[int, tuple[int, ...]]:
        """What the rows that are not answered have generated, as far as it is kept."""
        return self._partial

    def begin(self, began: RunBegan) -> None:
        """From now on rows run."""
        self._began = self._clock()
        self._observe(began)

    def commit(self, unit: int, rows: Sequence[int], table: pa.Table) -> None:
        """The answers of `rows` of a unit, and of their duplicates, are kept for good.

        Raises:
            StoppedEarly: another process has taken the job over.
            StorageFailed: the disk failed; the rows are not done.
        """
        path = self._store.commit(unit, table)
        self._observe(Committed(unit, path.name, len(rows)))
        for row in rows:
            self._partial.pop(row, None)

    def save_unfinished(self, rows: Mapping[int, tuple[int, ...]]) -> None:
        """What these rows have generated so far, and others before, is kept, to go on from. Raises as `commit`."""
        self._partial |= rows
        self._store.save_partial(self._partial)

    def suspect(self, rows: Iterable[int]) -> None:
        """A process failed while these ran. Raises as `commit`."""
        self._store.suspect(rows)

    def give_up(self, rows: Sequence[int], timeout_s: float, dump: Callable[[TextIO], None]) -> None:
        """A step with these rows does not end; `dump` writes where it is. Raises as `commit`."""
        self._store.suspect(rows)
        stuck = self._store.at.stuck
        with stuck.open("w") as file:
            dump(file)
        self._store.keep(stuck)
        _log.error(
            "a step did not end within %g s (--step-timeout); see %s; the same command goes on", timeout_s, stuck
        )

    def show(self, engine: EngineReport) -> None:
        """How it goes."""
        began = time.perf_counter()
        self._observe(self._tally.progress(engine, self._clock() - self._began))
        self.recording_s += time.perf_counter() - began
