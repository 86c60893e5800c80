"""What the driver does with workers that say what they are made to say."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from batchrun import planning
from batchrun.errors import EngineFailed, ModelUnavailable
from batchrun.executors import driver, fleets
from batchrun.executors.handout import Handout
from batchrun.executors.messages import (
    Brief,
    Ended,
    FromWorker,
    Lease,
    Lost,
    Ready,
    Said,
    ToWorker,
    Unfinished,
    Wants,
    packed,
    unpacked,
)
from batchrun.observe.events import RunBegan
from batchrun.pending import PENDING_SCHEMA, PendingUnit, leased_rows, pending_units
from batchrun.stop import StopRequest
from batchrun.store import partial, suspects
from batchrun.store.layout import Layout
from batchrun.store.store import Store
from tests.run.conftest import EchoJob, ignore

READY = Ready(RunBegan("echo", 4096, 1 << 20, 8, 64, shares_prefixes=True, is_gpu=False))
GIVE_UP = Ended(ModelUnavailable("no such device here"))


class Scripted:
    """A fleet whose workers each say the next line of their script when they are listened to."""

    def __init__(self, *scripts: list[FromWorker | Lost]) -> None:
        self._scripts = [*scripts]
        self._left: dict[int, list[FromWorker | Lost]] = {}
        self.briefs: list[Brief] = []
        self.told: list[tuple[int, ToWorker]] = []
        self.ended: list[int] = []

    def start(self, worker: int, brief: Brief) -> None:
        self.briefs.append(brief)
        self._left[worker] = self._scripts.pop(0) if self._scripts else []

    def send(self, worker: int, message: ToWorker) -> None:
        self.told.append((worker, message))

    def receive(self, timeout_s: float) -> list[tuple[int, FromWorker | Lost]]:
        return [(worker, script.pop(0)) for worker, script in self._left.items() if script]

    def end(self, worker: int) -> None:
        self.ended.append(worker)
        self._left.pop(worker, None)

    def leased(self, worker: int) -> list[list[int]]:
        """Rows of each lease that a worker got."""
        return [
            [row for unit in message.units for row in unpacked(unit.rows).column("row_idx").to_pylist()]
            for told, message in self.told
            if told == worker and isinstance(message, Lease)
        ]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_LAST_WORDS_S", 0.3)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(*scripts: list[FromWorker | Lost]) -> Scripted:
        fleet = Scripted(*scripts)

        @contextmanager
        def this(job: object) -> Iterator[Scripted]:
            yield fleet

        monkeypatch.setattr(fleets, "_fleet", this)
        return fleet

    return use


def test_what_a_worker_ends_with_ends_the_job_and_all_workers(echo_job: Any, scripted: Any) -> None:
    fleet = scripted([READY, Wants()], [GIVE_UP])
    with pytest.raises(ModelUnavailable, match="no such device here"):
        echo_job(20).submit(workers=2)
    assert {0, 1} <= {*fleet.ended}


def test_no_more_workers_than_rows(echo_job: Any, scripted: Any) -> None:
    fleet = scripted([GIVE_UP])
    with pytest.raises(ModelUnavailable):
        echo_job(2).submit(workers=9)
    assert len(fleet.briefs) == 2


def test_rows_of_a_failed_engine_go_last_and_alone(echo_job: Any, scripted: Any) -> None:
    """The other rows of the worker that is lost go on first, behind what they had generated."""
    job: EchoJob = echo_job(6)
    failed = Ended(EngineFailed("the device is lost", rows=(1, 3)))
    fleet = scripted([READY, Wants(), Unfinished({2: (7, 8)}), failed], [READY, Wants(), Wants(), Wants(), GIVE_UP])
    with pytest.raises(ModelUnavailable):
        job.submit(workers=1, executor="ray")
    assert sorted(fleet.leased(0)[0]) == [0, 1, 2, 3, 4, 5]
    assert sorted(row for lease in fleet.leased(1) for row in lease) == [0, 2, 4, 5]
    assert suspects.load(Layout(job.out)) == {1: 1, 3: 1}
    assert partial.load(Layout(job.out)) == {2: (7, 8)}
    (lease,) = (message for worker, message in fleet.told if worker == 1 and 2 in getattr(message, "output_ids", {}))
    assert lease.output_ids == {2: (7, 8)}


@pytest.mark.parametrize(("has_crashed", "blamed"), [(True, {0: 1, 1: 1, 2: 1}), (False, {})])
def test_rows_are_suspects_only_if_their_worker_crashed(
    echo_job: Any, scripted: Any, has_crashed: bool, blamed: dict[int, int]
) -> None:
    job: EchoJob = echo_job(3)
    scripted([READY, Wants(), Lost("it is gone", has_crashed)], [GIVE_UP])
    with pytest.raises(ModelUnavailable):
        job.submit(workers=1, executor="ray")
    assert suspects.load(Layout(job.out)) == blamed


def test_workers_that_are_lost_one_after_another_end_the_job(echo_job: Any, scripted: Any) -> None:
    fleet = scripted(*([READY, Lost("it fell over", True)] for _ in range(20)))
    with pytest.raises(EngineFailed, match="lost again and again, and answer no row: it fell over"):
        echo_job(3).submit(workers=2)
    assert len(fleet.briefs) == 6


def test_so_do_workers_none_of_which_can_be_started(echo_job: Any, scripted: Any) -> None:
    fleet = scripted(*([Lost("it fell over", True)] for _ in range(20)))
    with pytest.raises(EngineFailed, match="no worker can be started: it fell over"):
        echo_job(3).submit(workers=2)
    assert len(fleet.briefs) == 6


def test_a_worker_that_cannot_be_started_is_done_without(echo_job: Any, scripted: Any, caplog: Any) -> None:
    """However long the other one takes, and whatever it answers meanwhile."""
    slow: list[FromWorker | Lost] = [Said(logging.DEBUG, "loading")] * 12
    fleet = scripted([*slow, READY, Wants(), GIVE_UP], *([Lost("it fell over", True)] for _ in range(20)))
    with pytest.raises(ModelUnavailable):
        echo_job(3).submit(workers=2)
    assert len(fleet.briefs) == 6
    assert fleet.leased(0)
    assert "cannot be started (it fell over); the job goes on without it" in caplog.text


def test_an_error_takes_in_what_other_workers_have_done(echo_job: Any, scripted: Any) -> None:
    job: EchoJob = echo_job(6)
    scripted([READY, Wants(), GIVE_UP], [READY, Said(logging.DEBUG, ""), Unfinished({2: (7, 8)}), Ended()])
    with pytest.raises(ModelUnavailable):
        job.submit(workers=2)
    assert partial.load(Layout(job.out)) == {2: (7, 8)}


def test_a_worker_speaks_through_the_drivers_log(echo_job: Any, scripted: Any, caplog: Any) -> None:
    scripted([Said(logging.WARNING, "it is warm in here"), GIVE_UP])
    with pytest.raises(ModelUnavailable):
        echo_job(3).submit(workers=1, executor="ray")
    assert "worker 0: it is warm in here" in caplog.text


def test_a_stop_while_workers_load_is_not_waited_for(echo_job: Any, scripted: Any) -> None:
    scripted([], [])
    stop = StopRequest()
    stop.request("SIGTERM")
    with pytest.raises(Exception, match="stopped by SIGTERM"):
        echo_job(3).submit(stop, workers=2)


def test_a_lease_has_the_rows_of_its_places_over_all_units(echo_job: Any) -> None:
    """Each with what it shares with its neighbours, done rows left out."""
    job = echo_job(40).job()
    plan = planning.plan(job, ignore, StopRequest())
    (whole,) = pending_units(plan, Store.open(job.output))
    assert len(whole.positions) == plan.summary.num_unique
    few = np.delete(np.arange(len(whole.positions)), [4, 5])
    parts = [PendingUnit(at, whole.table, *_columns(whole, places)) for at, places in enumerate(np.split(few, [9]))]
    handout = Handout(job, parts)
    assert handout.row_idx.tolist() == whole.row_idx[few].tolist()
    lease = handout.lease(np.arange(7, 12), 3, {int(whole.row_idx[few][8]): (1, 2)}, {})
    assert ([unit.unit for unit in lease.units], lease.num_ahead) == ([0, 1], 3)
    rows = [row for unit in lease.units for row in leased_rows(unit.unit, unpacked(unit.rows), lease.output_ids, {})]
    assert [leased.row.row_idx for leased in rows] == whole.row_idx[few][7:12].tolist()
    assert [leased.row.shared_len for leased in rows] == whole.shared_len[few][7:12].tolist()
    assert [leased.output_ids for leased in rows] == [(), (1, 2), (), (), ()]
    assert (handout.work > 0).all()


def _columns(unit: PendingUnit, places: Any) -> tuple[Any, Any, Any]:
    return unit.positions[places], unit.shared_len[places], unit.keep_len[places]


def test_a_packed_slice_does_not_carry_the_whole() -> None:
    table = pa.table({name: pa.nulls(50_000, pa.int64()) for name in PENDING_SCHEMA.names})
    assert len(packed(table.slice(7, 3))) < 5_000
    assert unpacked(packed(table.slice(7, 3))) == table.slice(7, 3)
