"""Who may work on a job on an object store."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from batchrun.errors import StoppedEarly
from batchrun.store import object_lease
from batchrun.store.lease import Overtaken
from batchrun.store.object_lease import ObjectLease, last_term
from batchrun.store.objects import Objects


@pytest.fixture
def objects(s3) -> Objects:
    found = Objects.open("s3://lake/out.batchrun")
    found.put("head-00000001.json", b"{}")
    return found


def lease(objects: Objects, beat: Callable[[], None] = lambda: None) -> ObjectLease:
    return ObjectLease(objects, "s3://lake/out", beat)


class Clock:
    """In the place of the module `time`: it goes on only where a lease waits, and by as much as that waits for."""

    time_ns = staticmethod(time.time_ns)

    def __init__(self, passes: Callable[[], object] = lambda: None) -> None:
        self.now = time.time()
        self.passes = passes

    def time(self) -> float:
        return self.now

    monotonic = time

    def sleep(self, seconds: float) -> None:
        self.passes()
        self.now += seconds


def test_a_second_holder_is_told_who_has_it_and_comes_when_it_is_let_go(objects):
    first, second = lease(objects), lease(objects)
    first.acquire(0)

    with pytest.raises(StoppedEarly, match=r"s3://lake/out is held by process \d+ on host .*--wait-lock"):
        second.acquire(0)
    first.release()
    second.acquire(0)

    assert (first.is_held, second.is_held) == (False, True)
    second.check()
    second.release()
    assert objects.find("lock-").keys() == {"lock-00000002"}


def test_a_holder_that_is_silent_is_succeeded_and_told(objects, monkeypatch):
    """Paused for longer than a lease, then woken: it must not go on."""
    monkeypatch.setattr(object_lease, "time", Clock())
    monkeypatch.setattr(object_lease, "_BEAT_EVERY_S", 3600.0)
    first, second = lease(objects), lease(objects)
    first.acquire(0)

    second.acquire(2 * object_lease.LEASE_S)

    with pytest.raises(Overtaken, match="s3://lake/out was taken over by process"):
        first.check()
    assert not first.is_held
    first.release()
    second.check()
    second.release()


def test_a_holder_that_shows_life_is_waited_for_in_vain(objects, monkeypatch):
    beaten = threading.Event()

    def wait_for_a_sign() -> None:
        beaten.clear()
        assert beaten.wait(120)

    monkeypatch.setattr(object_lease, "time", Clock(wait_for_a_sign))
    monkeypatch.setattr(object_lease, "LEASE_S", 2.0)
    monkeypatch.setattr(object_lease, "_BEAT_EVERY_S", 0.01)
    first = lease(objects, beaten.set)
    first.acquire(0)

    with pytest.raises(StoppedEarly, match="is held by"):
        lease(objects).acquire(3.0)

    first.check()
    first.release()


def test_a_process_of_this_machine_that_has_ended_is_succeeded_at_once(objects):
    code = (
        "import os; from batchrun.store.object_lease import ObjectLease; from batchrun.store.objects import Objects;"
        "ObjectLease(Objects.open('s3://lake/out.batchrun'), '', lambda: None).acquire(0); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    term = last_term(objects)
    assert term is not None
    assert term.object.key == "lock-00000001"
    assert term.is_over

    following = lease(objects)
    following.acquire(0)

    assert following.is_held
    following.release()


def test_a_job_that_came_to_nothing_leaves_nothing(s3):
    objects = Objects.open("s3://lake/nothing.batchrun")
    only = lease(objects)
    only.acquire(0)
    only.release()

    assert s3.keys("lake") == []
