"""Killed between any two steps, the store goes on with what was committed, and OUT is whole or absent."""

import errno
import os
import resource
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from batchrun.errors import OutputRefused, StorageFailed
from batchrun.store.store import Store
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
            assert list(store.at.tmp.iterdir()) == []
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
        assert list(store.at.tmp.iterdir()) == []
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
        readable = again.out if again.out.exists() else folder / "out.batchrun" / "replaced"
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


@pytest.fixture
def trace(bench, monkeypatch):
    """The steps on disk as they are taken: name of the call and of the file or folder, temporary prefixes cut off."""
    steps = []

    def name(path) -> str:
        target = Path(f"/proc/self/fd/{path}").readlink() if isinstance(path, int) else Path(path)
        return target.name.split("-", 1)[1] if target.parent.name == "tmp" else target.name

    def traced(call: str, position: int):
        real = getattr(os, call)

        def step(*args, **kwargs):
            steps.append(f"{call} {name(args[position])}")
            return real(*args, **kwargs)

        return step

    for call, position in (("fsync", 0), ("link", 1), ("rename", 1), ("replace", 1), ("unlink", 0)):
        monkeypatch.setattr(os, call, traced(call, position))
    return steps


def test_commit_syncs_the_content_before_the_name_and_the_name_before_it_returns(bench, trace):
    with bench.working() as store:
        store.done(0)
        trace.clear()
        store.commit(0, bench.results([0]))

        assert trace == [
            "fsync part-00000-0001.parquet",
            "link part-00000-0001.parquet",
            "fsync parts",
            "unlink part-00000-0001.parquet",
        ]


def test_publication_syncs_all_it_contains_before_out_appears(bench, inputs, trace):
    with bench.working() as store:
        bench.commit(store, 0, [0, 1])
        trace.clear()
        bench.publish(store, inputs(2))

        assert trace == [
            "fsync part-00000.parquet",
            "fsync publish",
            "fsync manifest.json",
            "replace manifest.json",
            "fsync out.batchrun",
            "unlink manifest.json",
            "rename ready",
            "fsync out.batchrun",
            "unlink overwriting",
            "fsync out.batchrun",
            "rename out",
            f"fsync {bench.out.parent.name}",
            "unlink replaced",
            "unlink publish",
        ]


@pytest.mark.parametrize("call", ["fsync", "link"])
def test_commit_that_the_disk_refuses_is_a_storage_error_and_the_rows_are_done_later(bench, monkeypatch, call):
    def fail(*args: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with bench.working() as store:
        store.done(0)
        with monkeypatch.context() as broken:
            broken.setattr(os, call, fail)
            with pytest.raises(StorageFailed, match=r"part-00000-0001\.parquet: Input/output error; check the disk"):
                store.commit(0, bench.results([0, 1]))

        assert store.done(0).tolist() == []
        assert list(store.at.tmp.iterdir()) == []
        store.commit(0, bench.results([0, 1]))
        assert store.done(0).tolist() == [0, 1]


def test_commit_whose_name_cannot_be_synced_is_not_repeated_under_the_next_number(bench, monkeypatch):
    """The rows may be on disk or not: only reading the parts again can tell, never the worker's memory."""
    real = os.fsync
    syncs = []

    def fail_second(descriptor: int) -> None:
        syncs.append(descriptor)
        if len(syncs) == 2:
            raise OSError(errno.EIO, "Input/output error")
        real(descriptor)

    with bench.working() as store:
        store.done(0)
        with monkeypatch.context() as broken:
            broken.setattr(os, "fsync", fail_second)
            with pytest.raises(StorageFailed):
                store.commit(0, bench.results([0]))

        with pytest.raises(StorageFailed, match="was written by another worker"):
            store.commit(0, bench.results([0]))
        assert store.done(0).tolist() == [0]


@pytest.fixture
def full_disk():
    """A disk on which no file grows beyond 4 KiB: the system's own refusal in the middle of a write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_full_disk_fails_a_commit_with_the_remedy_and_gives_its_space_back(bench, request):
    with bench.working() as store:
        store.done(0)
        incompressible = bench.results(range(4000))
        request.getfixturevalue("full_disk")

        with pytest.raises(StorageFailed, match="free some space, then run the same command again"):
            store.commit(0, incompressible)

        assert list(store.at.tmp.iterdir()) == []
        assert store.done(0).tolist() == []


def test_full_disk_fails_a_publication_and_out_stays_absent(bench, inputs, request):
    with bench.working() as store:
        bench.commit(store, 0, range(4000))
        batches = inputs(4000)
        request.getfixturevalue("full_disk")

        with pytest.raises(StorageFailed, match="free some space"):
            bench.publish(store, batches)

        assert not bench.out.exists()
        assert list(store.at.tmp.iterdir()) == []


@pytest.mark.parametrize("call", ["rename", "replace"])
def test_publication_that_the_disk_refuses_is_repeated(bench, inputs, monkeypatch, call):
    def fail(*args: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with bench.working() as store:
        bench.commit(store, 0, [1, 0])
        with monkeypatch.context() as broken:
            broken.setattr(os, call, fail)
            with pytest.raises(StorageFailed, match="Input/output error"):
                bench.publish(store, inputs(2))
        assert not bench.out.exists()
        bench.publish(store, inputs(2))
        assert texts(bench.out) == ["answer 0", "answer 1"]


def test_folder_that_appears_at_out_is_not_touched_and_the_answers_wait(bench, inputs):
    with bench.working() as store:
        bench.commit(store, 0, [0])
        bench.out.mkdir()
        (bench.out / "thesis.tex").write_text("mine")

        with pytest.raises(OutputRefused, match="has appeared while the job ran; move it away"):
            bench.publish(store, inputs(1))

        assert (bench.out / "thesis.tex").read_text() == "mine"
    bench.out.rename(bench.out.with_name("elsewhere"))
    with Store.open(bench.out).lock():
        assert texts(bench.out) == ["answer 0"]


def test_foreign_file_that_appears_among_old_answers_stops_their_replacement(bench, inputs):
    with bench.working() as store:
        bench.commit(store, 0, [0])
        bench.publish(store, inputs(1))
    with bench.working(overwrite=True) as store:
        bench.commit(store, 0, [0])
        (bench.out / "thesis.tex").write_text("mine")

        with pytest.raises(OutputRefused, match="not a result of batchrun"):
            bench.publish(store, inputs(1))

        assert (bench.out / "thesis.tex").read_text() == "mine"
