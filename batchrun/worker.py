"""Feeds an engine with rows and hands in what it finishes: where the job side and the engine side meet.

A loop of four steps: keep enough rows waiting, run a step, take in what finished, hand it in when it is time: answers,
and the tokens of unfinished rows beside. Rows of the next unit enter while the last ones of a unit still run, so the
batch never drains at a border. Whose rows they are, and what becomes of the answers, others know.
"""

import faulthandler
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol, TextIO

import pyarrow as pa

from batchrun.engine.engine import Engine
from batchrun.engine.request import Completion, Request
from batchrun.errors import BatchrunError, EngineFailed, RowError
from batchrun.pending import LeasedRow
from batchrun.stop import AT_ONCE, DRAIN, StopRequest
from batchrun.tally import EngineReport, Tally
from batchrun.tasks.generate import PlannedRow, failed
from batchrun.tasks.task import Task
from batchrun.watchdog import Watchdog

_PROGRESS_EVERY_S = 0.5
_MOST_GIVEN_UP = 2  # processes that ended while a row ran: it is not run again


class Rows(Protocol):
    """Rows to run, as somebody hands them out; suspects when nothing else is left."""

    @property
    def is_over(self) -> bool:
        """Whether there will be no more."""
        ...

    @property
    def num_ahead(self) -> int:
        """How many are to wait in the engine, at least one."""
        ...

    def next(self) -> LeasedRow | None:
        """The next one; None when there is none, or none yet."""
        ...

    def wait(self) -> None:
        """Returns when `next` may have one, or there will be none, or somebody wants to stop."""
        ...


class Keeper(Protocol):
    """Whom a worker hands in what it has; all may raise what ends the worker."""

    def commit(self, unit: int, rows: Sequence[int], table: pa.Table) -> None:
        """The answers of `rows` of a unit, and of their duplicates."""
        ...

    def save_unfinished(self, rows: Mapping[int, tuple[int, ...]]) -> None:
        """What these rows have generated so far."""
        ...

    def suspect(self, rows: Iterable[int]) -> None:
        """The engine failed while these ran."""
        ...

    def give_up(self, rows: Sequence[int], timeout_s: float, dump: Callable[[TextIO], None]) -> None:
        """A step with these rows has lasted for `timeout_s`, and the process ends; `dump` writes where it is."""
        ...

    def show(self, engine: EngineReport) -> None:
        """How it goes."""
        ...


@dataclass(frozen=True, slots=True)
class Pace:
    """How often to hand in answers, how long rows may go on once somebody asks to stop, and a step before the process
    is given up (0: for ever); seconds.
    """

    checkpoint_every_s: float
    drain_timeout_s: float
    step_timeout_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Open:
    """A row in the engine, and what has come of its requests so far."""

    leased: LeasedRow
    num_requests: int
    completions: list[Completion]


class Worker:
    """Runs rows through one engine. `clock` is in seconds and only paces what is handed in."""

    def __init__(
        self,
        engine: Engine,
        task: Task,
        keeper: Keeper,
        tally: Tally,
        stop: StopRequest,
        pace: Pace,
        clock: Callable[[], float] = time.monotonic,
        exit_process: Callable[[int], None] = os._exit,
    ) -> None:
        self._engine = engine
        self._task = task
        self._keeper = keeper
        self._tally = tally
        self._stop = stop
        self._pace = pace
        self._clock = clock
        self._exit_process = exit_process
        self._watchdog = Watchdog(pace.step_timeout_s, self._give_up)
        self._busy_before = time.process_time()
        self.checkpoint_s = 0.0  # spent on handing in
        self._rows: dict[int, _Open] = {}  # in the engine, by row_idx
        self._finished: defaultdict[int, list[tuple[PlannedRow, tuple[Completion, ...]]]] = defaultdict(list)
        self._is_cut_off = False
        self._next: LeasedRow | None = None  # a suspect that waits until it can run alone

    def run(self, rows: Rows) -> bool:
        """Works until all rows are answered, or the wish to stop is fulfilled; whether all are.

        Whatever ends it, answers and the tokens of unfinished rows are handed in on the way out.

        Raises:
            DataError: too many rows have failed.
            EngineFailed: the engine failed; the rows that ran are run last and one at a time from now on.
            BatchrunError: what was handed in could not be kept.
        """
        try:
            with self._watchdog.watching():
                is_all_fed = self._work(rows)
        except EngineFailed as error:
            self._keeper.suspect(error.rows)
            raise
        finally:
            self._save()
        self._keeper.show(self._report())
        return is_all_fed and not self._rows

    def _work(self, rows: Rows) -> bool:
        """The loop; whether the engine was given every row that there is."""
        is_all_fed, deadline = False, None
        committed = shown = self._clock()
        while self._has_patience(deadline):
            if self._stop.level >= DRAIN and deadline is None:
                deadline = self._clock() + self._pace.drain_timeout_s
                is_all_fed = not self._put_back() and rows.is_over and self._next is None
            if deadline is None:
                self._feed(rows)
                is_all_fed = rows.is_over and self._next is None
            self._tally.check()
            if self._engine.has_work:
                with self._watchdog.step():
                    completions = self._engine.step()
                for completion in completions:
                    self._take(completion)
            elif is_all_fed or deadline is not None:
                break
            else:
                self._save()
                self._keeper.show(self._report())
                rows.wait()
            now = self._clock()
            if now - committed >= self._pace.checkpoint_every_s:
                self._save()
                committed = now
            if now - shown >= _PROGRESS_EVERY_S:
                self._keeper.show(self._report())
                shown = now
        return is_all_fed

    def _has_patience(self, deadline: float | None) -> bool:
        if self._stop.level >= AT_ONCE:
            return False
        return deadline is None or self._clock() < deadline

    def _feed(self, rows: Rows) -> None:
        """Keeps rows waiting in the engine."""
        while self._engine.num_waiting < rows.num_ahead:
            leased, self._next = self._next or rows.next(), None
            if leased is None:
                return
            row = leased.row
            error = row.error or _verdict(leased) or self._task.refusal(row)
            requests = () if error else self._task.requests(row, leased.output_ids)
            error = error or self._overflow(row, requests)
            if error is not None:
                self._finished[leased.unit].append((row, (failed(row, error),)))
                self._tally.count(row.num_answered, row.num_answered)
                continue
            if leased.num_given_up and self._engine.has_work:
                self._next = leased
                return
            self._rows[row.row_idx] = _Open(leased, len(requests), [])
            for request in requests:
                self._engine.add(request)
            if leased.num_given_up:
                return

    def _overflow(self, row: PlannedRow, requests: Iterable[Request]) -> RowError | None:
        """Of a row whose beams the pool may come to have no room for; a single sequence always fits."""
        most, capacity = max(map(self._engine.most_tokens, requests), default=0), self._engine.capacity
        if most <= capacity:
            return None
        return RowError(
            "overlong_prompt",
            f"row {row.row_idx}: its {self._task.num_beams} beams may need KV for {most:,} tokens, but the pool holds "
            f"{capacity:,}; raise --kv-cache-memory, or lower --max-tokens or --num-beams",
        )

    def _give_up(self) -> None:
        """Ends the process from the watchdog's thread. What is not saved may be half done, so nothing is."""
        try:
            rows = [row.row_idx for row in self._engine.in_flight()]

            def dump(file: TextIO) -> None:
                file.write(f"{self._engine.description}\nrows: {rows}\n\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)

            self._keeper.give_up(rows, self._pace.step_timeout_s, dump)
        finally:
            # Whatever could not be written: a process that stays would keep the job from everybody.
            self._exit_process(EngineFailed.exit_code)

    def _put_back(self) -> int:
        """Takes what has not begun out of the engine; how many requests. A row without one of its requests is no longer
        followed: what comes of the others is dropped."""
        waiting = self._engine.stop_admitting()
        for request in waiting:
            self._rows.pop(request.row_idx, None)
        return len(waiting)

    def _take(self, completion: Completion) -> None:
        opened = self._rows.get(completion.row_idx)
        if opened is None:
            return
        row = opened.leased.row
        opened.completions.append(self._task.checked(row, completion))
        if len(opened.completions) < opened.num_requests:
            return
        del self._rows[completion.row_idx]
        completions = tuple(sorted(opened.completions, key=attrgetter("branch")))
        self._finished[opened.leased.unit].append((row, completions))
        is_failed = any(one.error is not None for one in completions)
        self._tally.count(row.num_answered, row.num_answered if is_failed else 0)

    def _commit(self) -> None:
        for unit, finished in self._finished.items():
            self._keeper.commit(unit, [row.row_idx for row, _ in finished], self._task.fold(finished))
        self._finished.clear()

    def _save(self) -> None:
        if self._is_cut_off:
            return
        began = time.perf_counter()
        try:
            self._commit()
            in_flight = {row.row_idx: row.output_ids for row in self._engine.in_flight() if row.output_ids}
            if in_flight and self._task.can_resume:
                self._keeper.save_unfinished(in_flight)
        except BatchrunError:
            # The disk failed, or another process has the job now: one more try would only hide which.
            self._is_cut_off = True
            raise
        self.checkpoint_s += time.perf_counter() - began

    def _report(self) -> EngineReport:
        return EngineReport(
            statistics=self._engine.statistics(),
            mean_output_len=self._engine.mean_output_len(self._task.sampling),
            busy_s=time.process_time() - self._busy_before + self._engine.busy_elsewhere_s,
            latencies=self._engine.latencies(),
            slowest=self._engine.slowest_rows(),
        )


def _verdict(leased: LeasedRow) -> RowError | None:
    """Of a row that ran when two processes were given up, the second time alone."""
    if leased.num_given_up < _MOST_GIVEN_UP:
        return None
    return RowError("engine_error", f"{_MOST_GIVEN_UP} processes of the job ended while this row ran")
