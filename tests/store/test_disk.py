"""The order of the steps on disk, and what happens when the disk refuses one of them."""

import errno
import os
import resource
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from batchrun.errors import OutputRefused, StorageFailed
from batchrun.store.home import Disk
from batchrun.store.lease import Overtaken
from batchrun.store.store import PartExists, Store


def texts(out: Path) -> list[str | None]:
    return pq.read_table(out).column("text").to_pylist()


@pytest.fixture
def trace(bench, monkeypatch):
    """The steps on disk as they are taken: name of the call and of the file or folder, temporary prefixes cut off."""
    steps = []

    def name(path) -> str:
        target = Path(f"/proc/self/fd/{path}").readlink() if isinstance(path, int) else Path(path)
        return target.name.split("-", 1)[1] if "tmp" in target.parts[-3:-1] else target.name

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
            "fsync out.batchrun",
            "rename out",
            f"fsync {bench.out.parent.name}",
        ]


def test_old_answers_are_aside_for_good_before_the_mark_that_says_so_goes(bench, inputs, trace):
    """A power cut between left them at OUT without the mark, and every later command refused OUT as somebody else's."""
    with bench.working() as store:
        bench.commit(store, 0, [0, 1])
        bench.publish(store, inputs(2))
    with bench.working(overwrite=True) as store:
        bench.commit(store, 0, [0, 1])
        trace.clear()
        bench.publish(store, inputs(2))
    at = trace.index("rename replaced")
    assert trace[at : at + 7] == [
        "rename replaced",
        "rename out",
        "fsync replaced",
        f"fsync {bench.out.parent.name}",
        "fsync out.batchrun",
        "rename overwriting",
        "unlink overwriting",
    ]


@pytest.mark.parametrize("paused_at", ["replaced", "out", "overwriting"])
def test_a_process_that_was_paused_takes_nothing_from_out_when_its_successor_has_published(
    bench, inputs, monkeypatch, paused_at
):
    """It wakes at a rename with which it would have made room for its own answers."""
    with bench.working() as store:
        bench.commit(store, 0, [0, 1])
        bench.publish(store, inputs(2))
    real = os.rename

    def wake_late(source: Path, target: Path) -> None:
        if Path(target).name.endswith(paused_at):
            monkeypatch.setattr(os, "rename", real)
            real(holder, store.at.tmp / "swept")
            Disk(store.at).reveal(successor)
            # And one more job after that, which is to replace these answers.
            store.at.overwriting.touch()
        real(source, target)

    with bench.working(overwrite=True) as store:
        bench.commit(store, 0, [0, 1])
        holder, successor = store.tmp, store.at.tmp / "successor"
        successor.mkdir()
        monkeypatch.setattr(os, "rename", wake_late)
        with pytest.raises((StorageFailed, Overtaken)):
            bench.publish(store, inputs(2))
        assert (bench.out / "part-00000.parquet").exists()
        assert store.at.overwriting.exists()
        store.tmp.mkdir()


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
        assert list(store.tmp.iterdir()) == []
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

        with pytest.raises(PartExists, match="was written by another worker"):
            store.commit(0, bench.results([0]))
        assert store.done(0).tolist() == [0]


@contextmanager
def full_disk():
    """A disk on which no file grows beyond 4 KiB: the system's own refusal in the middle of a write.

    Only while it must be: the limit is the whole process's, the test report's own file included.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_full_disk_fails_a_commit_with_the_remedy_and_gives_its_space_back(bench):
    with bench.working() as store:
        store.done(0)
        incompressible = bench.results(range(4000))

        with full_disk(), pytest.raises(StorageFailed, match="free some space, then run the same command again"):
            store.commit(0, incompressible)

        assert list(store.tmp.iterdir()) == []
        assert store.done(0).tolist() == []


def test_full_disk_fails_a_publication_and_out_stays_absent(bench, inputs):
    with bench.working() as store:
        bench.commit(store, 0, range(4000))
        batches = inputs(4000)

        with full_disk(), pytest.raises(StorageFailed, match="free some space"):
            bench.publish(store, batches)

        assert not bench.out.exists()
        assert list(store.tmp.iterdir()) == []


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
