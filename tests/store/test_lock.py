"""One process on a job, and of two workers on one unit one that goes on."""

import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from batchrun.errors import StoppedEarly, StorageFailed
from batchrun.store import layout, lease
from batchrun.store.home import Disk
from batchrun.store.layout import Layout
from batchrun.store.lease import Overtaken
from batchrun.store.store import PartExists, Store
from tests.store.conftest import FINGERPRINT, Bench

ROOT = Path(__file__).parents[2]


HOLD = """
import sys
from pathlib import Path
from batchrun.store.store import Store
with Store.open(Path(sys.argv[1])).lock() as _:
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(bench):
    """Another process that holds OUT until it is killed or its stdin closes."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HOLD), str(bench.out)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    with process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_second_process_is_told_who_holds_the_output_and_changes_nothing(bench, holder):
    before = bench.tree()

    who = f"process {holder.pid} on host {socket.gethostname()}"
    with pytest.raises(StoppedEarly, match=who) as stop, Store.open(bench.out).lock():
        pytest.fail("two processes hold one output")

    assert stop.value.exit_code == 75
    assert "--wait-lock" in str(stop.value)
    assert bench.tree() == before


def test_lock_of_a_killed_process_is_free_at_once(bench, holder):
    holder.kill()
    holder.wait()

    with Store.open(bench.out).lock():
        assert json.loads(bench.out.with_name("out.batchrun").joinpath("holder.json").read_text())["pid"] == os.getpid()


DIE_ELSEWHERE = """
import os, socket, sys
from pathlib import Path
socket.gethostname = lambda: "gpu7"
from batchrun.store import layout, lease
layout.LEASE_S = lease.LEASE_S = 0.5
from batchrun.store.store import Store
with Store.open(Path(sys.argv[1])).lock():
    os._exit(9)
"""


@pytest.fixture
def dead_elsewhere(bench, monkeypatch):
    """A job folder whose holder died on another machine an instant ago; a lease is half a second."""
    for module in (layout, lease):
        monkeypatch.setattr(module, "LEASE_S", 0.5)
    died = subprocess.run([sys.executable, "-c", DIE_ELSEWHERE, str(bench.out)], cwd=ROOT, check=False)
    assert died.returncode == 9
    return Layout(bench.out)


def test_lock_of_a_process_that_died_on_another_machine_is_free_after_its_lease(bench, dead_elsewhere):
    now = time.time()
    os.utime(dead_elsewhere.lock, (now + 0.2, now + 0.2))
    with pytest.raises(StoppedEarly, match="on host gpu7"), Store.open(bench.out).lock():
        pytest.fail("it might be alive")
    os.utime(dead_elsewhere.lock, (now - 9, now - 9))
    with Store.open(bench.out).lock():
        assert dead_elsewhere.read_holder()["pid"] == os.getpid()


def test_lock_whose_content_was_lost_in_a_power_cut_is_taken(bench, dead_elsewhere, monkeypatch):
    monkeypatch.setattr(lease, "_SIGNING_S", 0.1)
    dead_elsewhere.lock.write_bytes(b"")
    with Store.open(bench.out).lock():
        assert dead_elsewhere.read_holder()["pid"] == os.getpid()


def test_holder_that_was_overtaken_writes_nothing_more_and_leaves_the_other_alone(bench):
    with bench.working() as store:
        store.done(0)
        store.at.lock.unlink()
        store.at.lock.write_text("another's")
        store.at.holder.write_text('{"pid": 7, "host": "gpu7"}')
        before = bench.tree()
        for write in (lambda: store.commit(0, bench.results([0])), lambda: store.save_partial({1: (2,)}), store.reveal):
            with pytest.raises(StoppedEarly, match="was taken over"):
                write()
        assert bench.tree() == before

    assert store.at.lock.read_text() == "another's"
    assert store.at.holder.exists()


@contextmanager
def pausing(at_line: int, meanwhile) -> Iterator[list[str]]:
    """Runs `meanwhile` before this line of all that empty a folder; the list then says which it was."""
    lines, names = itertools.count(), ("_start_over", "_discard", "remove", "check_lease")
    paused: list[str] = []

    def trace(frame, event, argument):
        if frame.f_code.co_name not in names or "/batchrun/store/" not in frame.f_code.co_filename:
            return None
        if event == "line" and next(lines) == at_line:
            paused.append(f"{frame.f_code.co_name}, line {frame.f_lineno}")
            sys.settrace(None)
            meanwhile()
        return trace

    return_to = sys.gettrace()
    sys.settrace(trace)
    try:
        yield paused
    finally:
        sys.settrace(return_to)


def start_over(bench, at_line: int) -> list[str]:
    """Starts over a folder with answers, and is overtaken at that line by a third job, which then ends."""

    def succeed() -> None:
        Layout(bench.out).lock.unlink()
        with bench.working(overwrite=True, model="third") as store:
            bench.commit(store, 0, [5])

    with bench.working() as store:
        bench.commit(store, 0, [0, 1])
    store = Store.open(bench.out, overwrite=True)
    with store.lock(), pausing(at_line, succeed) as paused:
        store.check({"output": str(bench.out)}, FINGERPRINT | {"model": "second"})
    return paused


def test_holder_paused_anywhere_while_it_starts_over_takes_nothing_from_its_successor(tmp_path):
    """Overtaken between its look at the lock and its removal, it removed the next job's job.json, or its parts."""
    num_paused = 0
    for at_line in itertools.count():
        bench = Bench(tmp_path / str(at_line) / "out")
        bench.out.parent.mkdir()
        with suppress(Overtaken):
            paused = start_over(bench, at_line)
            assert not paused, f"paused in {paused} it went on as if it had the folder still"
            break
        num_paused += 1
        with bench.working(model="third") as store:
            assert store.done(0).tolist() == [5], at_line
    assert num_paused > 50


def lose_and_fail(bench) -> None:
    with bench.working() as store:
        store.at.lock.unlink()
        shutil.rmtree(store.at.tmp)
        store.write_progress({"status": "in_progress"})


def test_what_fails_because_another_process_took_the_folder_over_is_not_called_a_failure_of_the_disk(bench):
    with pytest.raises(StoppedEarly, match="was taken over"):
        lose_and_fail(bench)


def test_waiting_process_gets_the_lock_when_the_holder_leaves_and_takes_its_unused_folder_along(bench, holder):
    holder.stdin.close()

    with Store.open(bench.out).lock(wait_s=20.0):
        assert bench.out.with_name("out.batchrun").is_dir()


def test_temporary_files_are_swept_by_the_next_holder_and_by_nobody_else(bench):
    with bench.working() as store:
        (store.at.tmp / "left-behind").mkdir()
        (store.at.tmp / "left-behind" / "run").write_text("x")

        with pytest.raises(StoppedEarly), Store.open(bench.out).lock():
            pytest.fail("two processes hold one output")

        assert (store.at.tmp / "left-behind" / "run").exists()

    with bench.working() as store:
        assert list(store.tmp.iterdir()) == []


def test_of_two_writers_of_one_number_exactly_one_wins_and_the_loser_stops(bench):
    with bench.working() as store:
        zombie = Store(store.at, Disk(store.at), overwrite=False)
        zombie.done(0)
        store.done(0)
        store.commit(0, bench.results([0, 1]))

        with pytest.raises(PartExists, match=r"part-00000-0001\.parquet was written by another worker") as loss:
            zombie.commit(0, bench.results([1, 2]))
        assert loss.value.exit_code == 75

        with pytest.raises(PartExists):
            zombie.commit(0, bench.results([2]))
        assert store.done(0).tolist() == [0, 1]
        assert list(store.tmp.iterdir()) == []


def test_worker_whose_temporary_file_was_swept_writes_nothing(bench, monkeypatch):
    with bench.working() as store:
        store.done(0)
        real = os.link
        monkeypatch.setattr(os, "link", lambda a, b: (Path(a).unlink(), real(a, b)))

        with pytest.raises(StorageFailed):
            store.commit(0, bench.results([0]))

        assert store.at.list_parts() == []


RACE = """
import sys
from pathlib import Path
import pyarrow as pa
from batchrun.store.home import Disk
from batchrun.store.layout import Layout
from batchrun.store.lease import Overtaken
from batchrun.store.store import PartExists, Store
from tests.store.conftest import FINGERPRINT, Bench
at, me = Layout(Path(sys.argv[1])), int(sys.argv[2])
store = Store(at, Disk(at), overwrite=False)
store.done(0)
print("ready", flush=True)
sys.stdin.readline()
won = 0
try:
    for i in range(50):
        store.commit(0, pa.table({"row_idx": [1000 * me + i]}))
        won += 1
except PartExists:
    pass
print(won)
"""


def test_two_processes_that_race_on_a_unit_lose_no_committed_row_and_only_one_goes_on(bench):
    with bench.working() as store:
        racers = [
            subprocess.Popen(
                [sys.executable, "-c", RACE, str(bench.out), str(me)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            )
            for me in (1, 2)
        ]  # fmt: skip
        for racer in racers:
            assert racer.stdout.readline() == "ready\n"
        for racer in racers:
            racer.stdin.write("\n")
            racer.stdin.flush()
        won = {me: int(racer.communicate()[0]) for me, racer in zip((1, 2), racers, strict=True)}

        assert sorted(won.values())[0] < sorted(won.values())[1] == 50
        expected = [1000 * me + i for me, count in won.items() for i in range(count)]
        assert sorted(store.done(0).tolist()) == expected
