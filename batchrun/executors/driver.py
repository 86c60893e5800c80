"""Runs a plan with several workers: leases them its rows, keeps what they hand in, ends them.

The process that holds the job is the driver, and the only one that touches its folder. Who its workers are and how
they are reached is the fleet's affair.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol, TextIO

from batchrun.errors import BatchrunError, EngineFailed
from batchrun.executors.answers import Answers
from batchrun.executors.handout import Handout
from batchrun.executors.local import Ran
from batchrun.executors.merged import merged
from batchrun.executors.messages import (
    Answered,
    Brief,
    Ended,
    FromWorker,
    Lost,
    Over,
    Ready,
    Said,
    Stop,
    Stuck,
    ToWorker,
    Unfinished,
    Wants,
    Working,
)
from batchrun.executors.suspicion import Suspicion
from batchrun.leases import Leases, Places, Portion
from batchrun.ledger import Ledger
from batchrun.observe.events import Observe
from batchrun.pending import pending_units
from batchrun.plan.plan import Plan
from batchrun.stop import AT_ONCE, StopRequest
from batchrun.store.store import Store
from batchrun.tally import EngineReport, Tally

_log = logging.getLogger(__name__)
_PROGRESS_EVERY_S = 0.5
# Workers that may be lost, beside as many as there are, with no row answered between: more are the job's fault.
_MOST_LOST = 2
# Beyond the time to drain: for a step that is under way, and for what is saved behind it.
_LEAVE_S = 30.0
_LAST_WORDS_S = 5.0


class Fleet(Protocol):
    """Workers by number, and lines to them."""

    def start(self, worker: int, brief: Brief) -> None:
        """Asks for one more worker; it is there when it says `Ready`, which may take as long as it likes."""
        ...

    def send(self, worker: int, message: ToWorker) -> None:
        """Tells a worker something; one that is gone is told nothing."""
        ...

    def receive(self, timeout_s: float) -> list[tuple[int, FromWorker | Lost]]:
        """What workers say, each in its order; waits so long for the first word. `Lost` is the last of a worker."""
        ...

    def end(self, worker: int) -> None:
        """Ends a worker now and without a word; nothing more is heard of it."""
        ...


@dataclass(slots=True)
class _Member:
    """A worker as the driver knows it; `held` are the places of the rows that it has, by row_idx."""

    is_ready: bool = False
    wants_rows: bool = False
    held: dict[int, int] = field(default_factory=dict)


class Driver:
    """One run of a plan by workers of a fleet. `clock` is in seconds."""

    def __init__(
        self,
        brief: Brief,
        num_workers: int,
        fleet: Fleet,
        plan: Plan,
        store: Store,
        observe: Observe,
        stop: StopRequest,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        job = brief.job
        self._brief = brief
        self._fleet = fleet
        self._stop = stop
        self._clock = clock
        self._checkpoint_every_s, self._drain_timeout_s = job.checkpoint_every, job.drain_timeout
        self._handout = Handout(job, list(pending_units(plan, store)))
        self._suspicion = Suspicion(store.load_suspects(), self._handout.place_of)
        self._num_workers = min(num_workers, len(self._handout.row_idx))
        self._leases = Leases(self._handout.shared_len, self._handout.work, self._num_workers, self._suspicion.waiting)
        self._tally = Tally(job, plan.summary, store.counts(), job.abort_after)
        self._ledger = Ledger(store, observe, self._tally, clock)
        self._answers = Answers(self._ledger, self._tally, f"{job.output_prefix}error")
        self._members: dict[int, _Member] = {}
        self._reports: dict[int, EngineReport] = {}
        self._past_reports: list[EngineReport] = []  # of workers that are gone
        self._said: deque[tuple[int, FromWorker | Lost]] = deque()
        self._num_started = 0
        self._num_lost = 0  # since a row was answered
        self._num_unstarted = 0  # lost before they were ready, one after another
        self._began_at: float | None = None  # when the first of them had loaded the model

    def run(self) -> Ran:
        """Works until every row is committed, or the wish to stop is fulfilled.

        Raises:
            ModelUnavailable, UsageError, DataError: as a worker does, or too many rows have failed.
            EngineFailed: workers are lost again and again.
            StorageFailed, StoppedEarly: what was answered could not be kept, or another process has the job now.
        """
        try:
            for _ in range(self._num_workers):
                self._start_one()
            self._work()
        except BatchrunError:
            if not self._answers.is_cut_off:
                self._hear_out()
            raise
        finally:
            for worker in [*self._members]:
                self._fleet.end(worker)
            self._answers.save()
        report = self._report()
        self._ledger.show(report)
        seconds = 0.0 if self._began_at is None else self._clock() - self._began_at
        return Ran(
            self._is_done, report.statistics.counters, seconds, self._answers.checkpoint_s, self._ledger.recording_s
        )

    @property
    def _is_done(self) -> bool:
        return not self._leases.num_left and self._suspicion.is_over

    def _work(self) -> None:
        committed = shown = self._clock()
        told, leaves_at = 0, math.inf
        while self._members and self._clock() < leaves_at:
            level = self._stop.level
            if level > told:
                told = level
                patience_s = self._drain_timeout_s if level < AT_ONCE else 0.0
                leaves_at = min(leaves_at, self._clock() + patience_s + _LEAVE_S)
                self._tell_all(Stop(level))
            elif self._is_done and not told:
                told, leaves_at = AT_ONCE, self._clock() + _LEAVE_S
                self._tell_all(Over())
            for worker, message in self._listen():
                self._hear(worker, message)
            if not told:
                self._serve()
            now = self._clock()
            if now - committed >= self._checkpoint_every_s:
                self._answers.save()
                committed = self._clock()
            if now - shown >= _PROGRESS_EVERY_S:
                self._ledger.show(self._report())
                shown = now
            self._tally.check()

    def _hear_out(self) -> None:
        """Takes in what workers have done when the job is to end by an error, of whatever kind."""
        leaves_at = self._clock() + _LAST_WORDS_S
        self._tell_all(Stop(AT_ONCE))
        while self._members and self._clock() < leaves_at:
            for worker, message in self._listen():
                match message:
                    case Answered() | Unfinished():
                        self._hear(worker, message)
                    case Ended() | Lost() | Stuck():
                        self._forget(worker)
                        self._fleet.end(worker)

    def _listen(self) -> Iterator[tuple[int, FromWorker | Lost]]:
        """What members say now, each word once, whoever asks for the next."""
        if not self._said:
            self._said.extend(self._fleet.receive(_PROGRESS_EVERY_S))
        while self._said:
            worker, message = self._said.popleft()
            if worker in self._members:
                yield worker, message

    def _start_one(self) -> None:
        worker = self._num_started
        self._num_started += 1
        self._members[worker] = _Member()
        self._fleet.start(worker, self._brief)

    def _tell_all(self, message: Stop | Over) -> None:
        """The last thing that workers are told; one that is still loading is not waited for."""
        for worker, member in [*self._members.items()]:
            if member.is_ready:
                self._fleet.send(worker, message)
            else:
                self._forget(worker)
                self._fleet.end(worker)

    def _hear(self, worker: int, message: FromWorker | Lost) -> None:
        member = self._members[worker]
        match message:
            case Ready():
                member.is_ready = True
                self._num_unstarted = 0
                self._leases.join(worker)
                self._begin(worker, message)
            case Wants():
                member.wants_rows = True
            case Answered():
                self._take(worker, message)
            case Unfinished():
                self._answers.take_tokens(message.rows)
            case Working():
                self._reports[worker] = message.engine
            case Said():
                _log.log(message.level, "worker %d: %s", worker, message.text)
            case Stuck():
                self._give_up(message)
                self._fleet.end(worker)
                self._lose(worker, message.rows, "a step did not end")
            case Ended(error=None):
                self._forget(worker)
                self._fleet.end(worker)
            case Ended(error=EngineFailed() as error):
                self._suspect(error.rows)
                self._fleet.end(worker)
                self._lose(worker, error.rows, str(error))
            case Ended(error=error):
                assert error is not None
                self._forget(worker)
                self._fleet.end(worker)
                raise error
            case Lost():
                # Any of the rows that it had may be what it fell over, and nobody knows which had begun.
                rows = tuple(member.held) if message.has_crashed else ()
                self._suspect(rows)
                self._lose(worker, rows, message.reason)

    def _begin(self, worker: int, ready: Ready) -> None:
        num, began = self._num_workers, ready.began
        _log.debug("worker %d has loaded the model", worker)
        if self._began_at is None:
            self._began_at = self._clock()
            self._ledger.begin(
                replace(
                    began,
                    pool_tokens=began.pool_tokens * num,
                    pool_bytes=began.pool_bytes * num,
                    max_num_seqs=began.max_num_seqs * num,
                    num_workers=num,
                )
            )

    def _serve(self) -> None:
        """Leases rows to whoever has room."""
        for worker, member in self._members.items():
            if not member.wants_rows or self._suspicion.is_with(worker):
                continue
            portion = Portion.of(self._leases.num_open, self._num_workers)
            places = self._leases.take(worker, portion.num_rows)
            if not len(places) and not member.held:
                places = self._suspicion.take(worker)
            if len(places):
                self._lease(worker, member, places, portion.num_ahead)

    def _lease(self, worker: int, member: _Member, places: Places, num_ahead: int) -> None:
        member.wants_rows = False
        member.held |= zip(self._handout.row_idx[places].tolist(), places.tolist(), strict=True)
        self._fleet.send(
            worker, self._handout.lease(places, num_ahead, self._answers.tokens, self._suspicion.num_given_up)
        )

    def _take(self, worker: int, answered: Answered) -> None:
        """Answers of rows that the worker holds, to be committed when it is time."""
        member = self._members[worker]
        places = [member.held.pop(row) for row in answered.rows]
        self._leases.finish(worker, self._suspicion.acquit(worker, places))
        self._answers.take(answered)
        self._num_lost = 0

    def _give_up(self, stuck: Stuck) -> None:
        def dump(file: TextIO) -> None:
            file.write(stuck.dump)

        self._ledger.give_up(stuck.rows, stuck.timeout_s, dump)
        self._suspicion.blame(stuck.rows)

    def _suspect(self, rows: Iterable[int]) -> None:
        if rows := tuple(rows):
            self._ledger.suspect(rows)
            self._suspicion.blame(rows)

    def _lose(self, worker: int, suspects: Iterable[int], reason: str) -> None:
        """The worker is gone: others run what it had, `suspects` last and alone, and another takes its place.

        Raises EngineFailed when that has happened too often, or none is left.
        """
        was_ready = self._members[worker].is_ready
        self._num_lost += was_ready
        self._num_unstarted = 0 if was_ready else self._num_unstarted + 1
        self._forget(worker, suspects)
        if self._stop.level or self._is_done:
            return
        if self._num_lost > self._num_workers + _MOST_LOST:
            raise EngineFailed(f"workers are lost again and again, and answer no row: {reason}")
        if self._num_unstarted <= self._num_workers + _MOST_LOST:
            _log.warning("worker %d is lost (%s); others go on with its rows", worker, reason)
            self._start_one()
        elif self._members:
            _log.warning("worker %d cannot be started (%s); the job goes on without it", worker, reason)
        else:
            raise EngineFailed(f"no worker can be started: {reason}")

    def _forget(self, worker: int, suspects: Iterable[int] = ()) -> None:
        member = self._members.pop(worker)
        if worker in self._reports:
            self._past_reports.append(self._reports.pop(worker))
        if not member.is_ready:
            return
        places = [member.held[row] for row in suspects if row in member.held]
        self._leases.leave(worker, self._suspicion.leave(worker, places))

    def _report(self) -> EngineReport:
        return merged(self._reports.values(), self._past_reports)
