"""Feeds an engine from the plan and commits what it finishes: where the job side and the engine side meet.

A loop of four steps: keep enough rows waiting, run a step, take in what finished, commit when it is time: finished
rows as a part, the tokens of unfinished ones beside. Rows of the next unit enter while the last ones of a unit still
run, so the batch never drains at a border.
"""

import faulthandler
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchrun.engine.engine import Engine
from batchrun.engine.request import Completion, Request
from batchrun.errors import BatchrunError, DataError, EngineFailed, RowError
from batchrun.observe.events import Committed, Observe, RunProgress
from batchrun.plan.plan import Plan, Unit, read_unit
from batchrun.stop import AT_ONCE, DRAIN, StopRequest
from batchrun.store.store import Store
from batchrun.tasks.generate import PlannedRow, failed
from batchrun.tasks.task import Task
from batchrun.watchdog import Watchdog

_log = logging.getLogger(__name__)
_ROWS_AHEAD = 512  # waiting in the engine, so that it can look past a row that does not fit
_PROGRESS_EVERY_S = 0.5
_MOST_GIVEN_UP = 2  # processes that ended while a row ran: it is not run again


@dataclass(frozen=True, slots=True)
class Pace:
    """How often to commit, how long rows may go on once somebody asks to stop, and a step before the process is given
    up (0: for ever); seconds. `abort_after`: failed rows at which the job stops.
    """

    checkpoint_every_s: float
    drain_timeout_s: float
    step_timeout_s: float = 0.0
    abort_after: int | None = None


@dataclass(frozen=True, slots=True)
class _Open:
    """A row in the engine, and what has come of its requests so far."""

    unit: Unit
    row: PlannedRow
    num_requests: int
    completions: list[Completion]


@dataclass(slots=True)
class _Tally:
    """Rows of the input, over this run and those before it, of which `num_before` were done when this one began."""

    num_before: int
    num_done: int
    num_failed: int


class Worker:
    """Runs the pending rows of a plan through one engine. `clock` is in seconds and only paces the commits."""

    def __init__(
        self,
        engine: Engine,
        task: Task,
        store: Store,
        observe: Observe,
        stop: StopRequest,
        pace: Pace,
        clock: Callable[[], float] = time.monotonic,
        exit_process: Callable[[int], None] = os._exit,
    ) -> None:
        self._engine = engine
        self._task = task
        self._store = store
        self._observe = observe
        self._stop = stop
        self._pace = pace
        self._clock = clock
        self._exit_process = exit_process
        self._watchdog = Watchdog(pace.step_timeout_s, self._give_up)
        self.checkpoint_s = 0.0  # spent on saving
        self.recording_s = 0.0  # spent on saying how it goes: progress, series and metrics
        self._rows: dict[int, _Open] = {}  # in the engine, by row_idx
        self._finished: defaultdict[Unit, list[tuple[PlannedRow, tuple[Completion, ...]]]] = defaultdict(list)
        before = store.counts()
        self._tally = _Tally(before.rows, before.rows, before.failed)
        self._partial: dict[int, tuple[int, ...]] = {}
        self._is_cut_off = False
        self._suspects = store.load_suspects()
        self._next: tuple[Unit, PlannedRow] | None = None  # a suspect that waits until it can run alone

    def run(self, plan: Plan) -> bool:
        """Works until every row is committed, or the wish to stop is fulfilled; whether every row is done.

        Whatever ends it, finished rows are committed and the tokens of unfinished ones saved on the way out.

        Raises:
            StoppedEarly: another process has taken the job over.
            DataError: a row needs more KV than the pool has, and nothing was run; or too many rows have failed.
            EngineFailed: the engine failed; the rows that ran are run last and one at a time from now on.
            StorageFailed: a commit failed; what was committed before stays.
        """
        self._check_fits(plan)
        self._partial = self._store.load_partial()
        began = self._clock()
        try:
            with self._watchdog.watching():
                is_all_fed = self._work(plan, began)
        except EngineFailed as error:
            self._store.suspect(error.rows)
            raise
        finally:
            self._save()
        self._show(plan, self._clock() - began)
        return is_all_fed and not self._rows

    def _work(self, plan: Plan, began: float) -> bool:
        """The loop; whether the engine was given every pending row."""
        rows, is_all_fed = self._pending(plan), False
        deadline: float | None = None
        committed = shown = began
        while self._has_patience(deadline):
            if self._stop.level >= DRAIN and deadline is None:
                deadline = self._clock() + self._pace.drain_timeout_s
                is_all_fed = not self._put_back() and is_all_fed
            if deadline is None and not is_all_fed:
                is_all_fed = not self._feed(rows)
            self._check_failures(plan)
            if not self._engine.has_work:
                break
            with self._watchdog.step():
                completions = self._engine.step()
            for completion in completions:
                self._take(completion)
            now = self._clock()
            if now - committed >= self._pace.checkpoint_every_s:
                self._save()
                committed = now
            if now - shown >= _PROGRESS_EVERY_S:
                self._show(plan, now - began)
                shown = now
        return is_all_fed

    def _has_patience(self, deadline: float | None) -> bool:
        if self._stop.level >= AT_ONCE:
            return False
        return deadline is None or self._clock() < deadline

    def _feed(self, rows: Iterator[tuple[Unit, PlannedRow]]) -> bool:
        """Keeps rows waiting in the engine; whether there may be more."""
        while self._engine.num_waiting < _ROWS_AHEAD:
            following, self._next = self._next or next(rows, None), None
            if following is None:
                return False
            unit, row = following
            error = row.error or self._verdict(row) or self._task.refusal(row)
            requests = () if error else self._task.requests(row, self._partial.get(row.row_idx, ()))
            error = error or self._overflow(row, requests)
            if error is not None:
                self._finished[unit].append((row, (failed(row, error),)))
                self._tally.num_failed += row.num_answered
                self._tally.num_done += row.num_answered
                continue
            if row.row_idx in self._suspects and self._engine.has_work:
                self._next = following
                return True
            self._rows[row.row_idx] = _Open(unit, row, len(requests), [])
            for request in requests:
                self._engine.add(request)
            if row.row_idx in self._suspects:
                return True
        return True

    def _verdict(self, row: PlannedRow) -> RowError | None:
        """Of a row that ran when two processes were given up, the second time alone."""
        if self._suspects.get(row.row_idx, 0) < _MOST_GIVEN_UP:
            return None
        return RowError("engine_error", f"{_MOST_GIVEN_UP} processes of the job ended while this row ran")

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

    def _check_failures(self, plan: Plan) -> None:
        tally, most = self._tally, self._pace.abort_after
        if most is not None and tally.num_failed >= most and tally.num_done < plan.summary.num_rows:
            raise DataError(
                f"stopped after {tally.num_failed:,} failed rows (--abort-after {most}); what was done is kept, and "
                "the same command with a higher --abort-after, or without it, goes on"
            )

    def _give_up(self) -> None:
        """Ends the process from the watchdog's thread. What is not saved may be half done, so nothing is."""
        at = self._store.at
        try:
            in_flight = self._engine.in_flight()
            self._store.suspect(row.row_idx for row in in_flight)
            with at.stuck.open("w") as file:
                file.write(f"{self._engine.description}\nrows: {[row.row_idx for row in in_flight]}\n\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
            self._store.keep(at.stuck)
            _log.error(
                "a step did not end within %g s (--step-timeout); see %s; the same command goes on",
                self._pace.step_timeout_s,
                at.stuck,
            )
        finally:
            # Whatever could not be written: a process that stays would keep the job from everybody.
            self._exit_process(EngineFailed.exit_code)

    def _check_fits(self, plan: Plan) -> None:
        longest, capacity = plan.summary.longest_len, self._engine.capacity
        if longest > capacity:
            raise DataError(
                f"the longest row needs KV for {longest:,} tokens, prompt and output, but the pool holds {capacity:,}; "
                "raise --kv-cache-memory, or lower --max-tokens or --max-model-len"
            )

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
        opened.completions.append(self._task.checked(opened.row, completion))
        if len(opened.completions) < opened.num_requests:
            return
        del self._rows[completion.row_idx]
        self._partial.pop(completion.row_idx, None)
        row, completions = opened.row, tuple(sorted(opened.completions, key=attrgetter("branch")))
        self._finished[opened.unit].append((row, completions))
        self._tally.num_done += row.num_answered
        self._tally.num_failed += row.num_answered if any(one.error is not None for one in completions) else 0

    def _commit(self) -> None:
        for unit, finished in self._finished.items():
            path = self._store.commit(unit.index, self._task.fold(finished))
            self._observe(Committed(unit.index, path.name, len(finished)))
        self._finished.clear()

    def _save(self) -> None:
        if self._is_cut_off:
            return
        began = time.perf_counter()
        try:
            self._commit()
            in_flight = {row.row_idx: row.output_ids for row in self._engine.in_flight() if row.output_ids}
            if in_flight and self._task.can_resume:
                self._store.save_partial(self._partial | in_flight)
        except BatchrunError:
            # The disk failed, or another process has the job now: one more try would only hide which.
            self._is_cut_off = True
            raise
        self.checkpoint_s += time.perf_counter() - began

    def _pending(self, plan: Plan) -> Iterator[tuple[Unit, PlannedRow]]:
        """The rows that are in no part yet, in plan order; suspects behind the others."""
        shared_len, suspects = 0, []
        for unit in plan.units:
            table = read_unit(unit)
            done = np.isin(table.column("row_idx").to_numpy(), self._store.done(unit.index))
            for row in _planned_rows(table, np.flatnonzero(~done), shared_len):
                if row.row_idx in self._suspects:
                    suspects.append((unit, row))
                else:
                    yield unit, row
            shared_len = table.column("keep_len")[-1].as_py() if table.num_rows else shared_len
        yield from suspects

    def _show(self, plan: Plan, elapsed_s: float) -> None:
        began = time.perf_counter()
        self._observe(self._progress(plan, elapsed_s))
        self.recording_s += time.perf_counter() - began

    def _progress(self, plan: Plan, elapsed_s: float) -> RunProgress:
        statistics = self._engine.statistics()
        counters, summary, tally = statistics.counters, plan.summary, self._tally
        prompt_tokens = summary.unique_prompt_tokens if self._engine.shares_prefixes else summary.prompt_tokens
        work = prompt_tokens + round(
            summary.num_unique * self._task.num_beams * self._engine.mean_output_len(self._task.sampling)
        )
        if tally.num_done == summary.num_rows:
            # The end is known: what was expected of outputs no longer matters.
            work = counters.computed_tokens - counters.recomputed_tokens
        done_before = work * tally.num_before // max(summary.num_rows, 1)
        return RunProgress(
            rows_done=tally.num_done,
            rows_total=summary.num_rows,
            rows_failed=tally.num_failed,
            tokens_done=min(work, done_before + counters.computed_tokens - counters.recomputed_tokens),
            tokens_total=work,
            elapsed_s=elapsed_s,
            statistics=statistics,
            latencies=self._engine.latencies(),
            slowest=tuple(
                replace(row, row_idx=row.row_idx // self._task.num_samples) for row in self._engine.slowest_rows()
            ),
        )


def _planned_rows(table: pa.Table, positions: NDArray[np.int64], first_shared_len: int) -> Iterator[PlannedRow]:
    """The rows at `positions`; what lies between two of them shortens the prefix that they share.

    `first_shared_len` is what the unit's first row shares with the last one of the unit before.
    """
    if not len(positions):
        return
    shared_len = np.concatenate([[first_shared_len], table.column("keep_len").to_numpy()])
    keep_len = np.minimum.reduceat(table.column("keep_len").to_numpy(), positions)
    tokens = table.column("token_ids").combine_chunks()
    offsets, values = tokens.offsets.to_numpy(), tokens.values.to_numpy()
    row_idx, params = table.column("row_idx"), table.column("params")
    duplicates, errors = table.column("duplicates"), table.column("error")
    for at, keep in zip(positions.tolist(), keep_len.tolist(), strict=True):
        error = errors[at].as_py()
        yield PlannedRow(
            row_idx=row_idx[at].as_py(),
            token_ids=values[offsets[at] : offsets[at + 1]],
            shared_len=int(shared_len[at]),
            keep_len=keep,
            params=params[at].as_py(),
            duplicates=tuple(duplicates[at].as_py() or ()),
            error=None if error is None else RowError(**error),
        )
