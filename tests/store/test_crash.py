"""Killed between any two steps, the store goes on with what was committed, and OUT is whole or absent."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from batchrun.errors import OutputRefused
from batchrun.store.verify import verify

ROOT = Path(__file__).parents[2]

# Runs a scenario once for every step it takes, each time in a fresh copy of a folder and in a process that dies just
# before that step, as by kill -9: no handler, no finally. The last copy is of a run that came through.
DRIVER = """
import os, shutil, sys
import pyarrow as pa
from itertools import count
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from conftest import Bench
folder = Path(sys.argv[1])
scenario = sys.stdin.read()
os_fsync = os.fsync
STEPS = ("link", "fsync", "rename", "replace", "unlink", "mkdir", "rmdir")

def die_before(due):
    taken = count(1)
    for name in STEPS:
        def step(*args, real=getattr(os, name), **kwargs):
            if next(taken) == due:
                os._exit(9)
            # A kill loses nothing that was written: syncing would only cost time here.
            return None if real is os_fsync else real(*args, **kwargs)
        setattr(os, name, step)

# Whatever pyarrow does on its first use is done once, not in every child.
warm = Bench(folder / "warm" / "out")
with warm.working() as store:
    warm.commit(store, 0, [0])
    warm.publish(store, [pa.record_batch({"row_idx": [0]})])

for due in count(1):
    copy = folder / f"died-{due:03d}"
    shutil.copytree(folder / "before", copy)
    child = os.fork()
    if not child:
        die_before(due)
        exec(scenario, {"bench": Bench(copy / "out"), "pa": pa})
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if os.waitstatus_to_exitcode(status) != 9:
        sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.fixture
def deaths(bench, tmp_path, monkeypatch):
    """A function that kills a scenario at every step of it; returns the folders as they were left."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)

    def kill_everywhere(scenario: str) -> list[Path]:
        before = tmp_path / "before"
        before.mkdir()
        for path in (bench.out, bench.out.with_name("out.batchrun")):
            if path.exists():
                path.rename(before / path.name)
        driver = [sys.executable, "-c", DRIVER, str(tmp_path), str(Path(__file__).parent)]
        subprocess.run(driver, input=scenario, text=True, check=True, cwd=ROOT, timeout=120)
        return sorted(tmp_path.glob("died-*"))

    return kill_everywhere


def texts(out: Path) -> list[str | None]:
    return pq.read_table(out).column("text").to_pylist()


def text(file: Path) -> str | None:
    return file.read_text() if file.exists() else None


def in_folder(bench, folder: Path):
    return type(bench)(folder / "out")


def test_commit_killed_anywhere_is_whole_or_never_happened(bench, deaths):
    with bench.working() as store:
        bench.commit(store, 0, [0, 1])

    folders = deaths("""
with bench.working() as store:
    bench.commit(store, 0, [2, 3])
""")

    outcomes = []
    for folder in folders:
        with in_folder(bench, folder).working() as store:
            outcomes.append(sorted(store.done(0).tolist()))
            assert list(store.tmp.iterdir()) == []
            store.commit(0, bench.results(sorted({2, 3, 4} - set(outcomes[-1]))))
            assert sorted(store.done(0).tolist()) == [0, 1, 2, 3, 4]
    assert len(folders) > 10
    # Monotonous: before the link nothing, from the link on everything.
    assert sorted(outcomes) == outcomes
    assert outcomes[0] == [0, 1]
    assert outcomes[-1] == [0, 1, 2, 3]


def test_first_run_killed_anywhere_starts_cleanly(bench, deaths):
    folders = deaths("""
with bench.working() as store:
    bench.commit(store, 0, [0])
""")

    for folder in folders:
        with in_folder(bench, folder).working() as store:
            assert store.done(0).tolist() in ([], [0])


def test_publication_killed_anywhere_leaves_out_absent_or_whole_and_is_finished_by_the_next_run(bench, inputs, deaths):
    with bench.working() as store:
        bench.plan(store, 5)
        bench.commit(store, 0, [4, 0, 2])
        bench.commit(store, 1, [3, 1])

    folders = deaths("""
with bench.working() as store:
    bench.publish(store, [pa.record_batch({"row_idx": range(5), "name": [f"row {i}" for i in range(5)]})])
""")

    for folder in folders:
        again = in_folder(bench, folder)
        assert not again.out.exists() or texts(again.out) == [f"answer {row}" for row in range(5)]
        with again.working() as store:
            if not store.is_complete:
                bench.publish(store, inputs(5))
        assert verify(again.out).problems == ()
        assert list(store.tmp.iterdir()) == []
    assert len(folders) > 20


def test_overwriting_killed_anywhere_loses_neither_the_old_answers_nor_the_new(bench, inputs, deaths):
    with bench.working() as store:
        bench.plan(store, 2)
        bench.commit(store, 0, [1, 0])
        bench.publish(store, inputs(2))
    old = [f"answer {row}" for row in range(2)]
    new = [f"answer {row}" for row in range(3)]

    folders = deaths("""
with bench.working(overwrite=True, model="new") as store:
    bench.plan(store, 3)
    bench.commit(store, 0, [2, 0])
    bench.commit(store, 0, [1])
    bench.publish(store, [pa.record_batch({"row_idx": range(3), "name": [f"row {i}" for i in range(3)]})])
""")

    seen = []
    for folder in folders:
        again = in_folder(bench, folder)
        readable = again.out if again.out.exists() else folder / "out.batchrun" / "replaced" / "out"
        assert texts(readable) in (old, new)
        seen.append("out" if again.out.exists() else "aside")
        with again.working(overwrite=True, model="new") as store:
            if not store.is_complete:
                bench.plan(store, 3)
                missing = sorted({0, 1, 2} - set(store.done(0).tolist()))
                if missing:
                    store.commit(0, bench.results(missing))
                bench.publish(store, inputs(3))
        assert texts(again.out) == new
        assert verify(again.out).problems == ()
        assert not store.at.replaced.exists()
        assert not store.at.ready.exists()
    assert "aside" in seen
    assert len(folders) > 50


def test_start_over_killed_anywhere_never_passes_the_old_answers_off_as_the_new_jobs(bench, inputs, deaths):
    with bench.working() as store:
        bench.commit(store, 0, [1, 0])
        bench.publish(store, inputs(2))

    folders = deaths("""
with bench.working(overwrite=True, model="new"):
    pass
""")

    for folder in folders:
        again = in_folder(bench, folder)
        assert texts(again.out) == ["answer 0", "answer 1"]
        with again.working(overwrite=True, model="new") as store:
            assert not store.is_complete
            assert store.done(0).tolist() == []


def test_old_job_goes_on_after_an_overwriting_one_died_early(bench, inputs, deaths):
    """Whoever changes their mind gets the old job back, or a refusal; never a mixture."""
    with bench.working() as store:
        (store.at.plan / "unit-00000.arrow").write_bytes(b"unit")
        bench.commit(store, 0, [1, 0])
        bench.publish(store, inputs(2))

    folders = deaths("""
with bench.working(overwrite=True, model="new"):
    pass
""")

    for folder in folders:
        again = in_folder(bench, folder)
        if '"echo"' in (text(folder / "out.batchrun" / "job.json") or ""):
            assert len(list((folder / "out.batchrun" / "plan").iterdir())) == 2
        with suppress(OutputRefused), again.working() as store:
            if not store.is_complete:
                missing = sorted({0, 1} - set(store.done(0).tolist()))
                if missing:
                    store.commit(0, bench.results(missing))
                bench.publish(store, inputs(2))
        assert texts(again.out) == ["answer 0", "answer 1"]


def test_saved_tokens_killed_anywhere_are_the_old_or_the_new(bench, deaths):
    with bench.working() as store:
        store.save_partial({1: (1,), 2: (2,)})

    folders = deaths("""
with bench.working() as store:
    store.save_partial({2: (2, 3)})
""")

    for folder in folders:
        with in_folder(bench, folder).working() as store:
            assert store.load_partial() in ({1: (1,), 2: (2,)}, {2: (2, 3)})


def test_answers_taken_back_and_replaced_killed_anywhere_are_the_old_or_the_new(bench, inputs, deaths):
    """And whatever was in reach of the one that died is done again by the next: no row is lost, none is there twice."""
    with bench.working() as store:
        bench.plan(store, 4)
        bench.commit(store, 0, [3, 0])
        bench.commit(store, 0, [2, 1], failed=[1])
        store.save_partial({1: (7, 7)})
        bench.publish(store, inputs(4))
    old = ["answer 0", None, "answer 2", "answer 3"]
    new = [f"answer {row}" for row in range(4)]

    folders = deaths("""
import numpy as np
from batchrun.store.parts import write_without
with bench.working() as store:
    staged = store.at.tmp / "staged"
    (staged / "plan").mkdir(parents=True)
    (staged / "plan" / "plan.json").write_text('{"summary": {"num_rows": 4}, "units": [1]}')
    (staged / "parts").mkdir()
    write_without(store.at.list_parts(), np.array([1]), staged / "parts", store.job_id)
    (staged / "retry.json").write_text("{}")
    store.take_back(staged)
    bench.commit(store, 1, [1])
    bench.publish(store, [pa.record_batch({"row_idx": range(4), "name": [f"row {i}" for i in range(4)]})])
""")

    seen = []
    for folder in folders:
        again = in_folder(bench, folder)
        readable = again.out if again.out.exists() else folder / "out.batchrun" / "replaced" / "out"
        seen.append(texts(readable))
        assert seen[-1] in (old, new)
        with again.working() as store:
            done = sorted([*store.done(0).tolist(), *store.done(1).tolist()])
            is_taken_back = text(store.at.plan / "plan.json") != '{"summary": {"num_rows": 4}, "units": []}'
            assert done == ([0, 1, 2, 3] if not is_taken_back or store.is_complete or 1 in done else [0, 2, 3])
            assert store.is_complete or is_taken_back
            assert (store.load_partial() == {}) == is_taken_back
            if not store.is_complete:
                if 1 not in done:
                    store.commit(1, bench.results([1]))
                bench.publish(store, inputs(4))
        assert texts(again.out) == (new if is_taken_back else old)
        assert verify(again.out).problems == ()
        assert not store.at.next.exists()
    assert seen[0] == old
    assert seen[-1] == new
    assert len(folders) > 50
