"""The job folder: refusals, the lock, the job's identity and what counts as done."""

import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from batchrun.errors import JobMismatch, OutputRefused, StoppedEarly, StorageFailed
from batchrun.store.counts import Counts, PartDamaged
from batchrun.store.store import PartExists, Store

ROOT = Path(__file__).parents[2]


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every name below `folder` with its content: what "nothing changed" compares."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")
    }




def test_open_changes_nothing(bench):
    Store.open(bench.out)

    assert tree(bench.out.parent) == {}


def test_output_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")

    with pytest.raises(OutputRefused, match="file is not a folder; choose another -o") as refusal:
        Store.open(tmp_path / "file" / "deep" / "out")

    assert refusal.value.exit_code == 73


def test_output_that_the_system_will_not_create_is_refused():
    """/proc takes no folders, not even from root, for whom every permission check passes."""
    store = Store.open(Path("/proc/batchrun-out"))

    with pytest.raises(OutputRefused, match="cannot create /proc/batchrun-out"), store.lock():
        pytest.fail("the lock was granted")


def test_unwritable_parent_is_refused_with_the_folder_named(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)

    with pytest.raises(OutputRefused, match=f"no permission to write in {tmp_path}"):
        Store.open(tmp_path / "new" / "out")

    assert tree(tmp_path) == {}


@pytest.mark.parametrize("out", [".", "..", "/", "a/.."])
def test_output_without_a_name_is_refused(out):
    with pytest.raises(OutputRefused, match="no name of its own"):
        Store.open(Path(out))


def test_output_by_url_is_refused():
    with pytest.raises(OutputRefused, match="not a local path"):
        Store.open(Path("s3://bucket/out"))


@pytest.mark.parametrize("overwrite", [False, True])
def test_output_that_is_a_file_is_refused_also_with_overwrite(bench, overwrite):
    bench.out.write_text("mine")

    with pytest.raises(OutputRefused, match="not a folder; move it, or choose another -o"):
        Store.open(bench.out, overwrite=overwrite)

    assert bench.out.read_text() == "mine"


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("names", [[], ["thesis.tex"], ["part-00000.parquet", "thesis.tex"]])
def test_folder_that_batchrun_did_not_write_is_refused_also_with_overwrite(bench, overwrite, names):
    bench.out.mkdir()
    for name in names:
        (bench.out / name).write_text("mine")
    before = tree(bench.out)

    with pytest.raises(OutputRefused, match="not a result of batchrun; move it"):
        Store.open(bench.out, overwrite=overwrite)

    assert tree(bench.out) == before


def test_result_without_its_job_folder_is_replaced_only_with_overwrite(bench):
    bench.out.mkdir()
    (bench.out / "part-00000.parquet").write_text("old")

    with pytest.raises(OutputRefused, match="--overwrite to replace it"):
        Store.open(bench.out)

    assert not Store.open(bench.out, overwrite=True).is_complete


def test_job_folder_that_is_a_file_is_refused(bench):
    bench.out.with_name("out.batchrun").write_text("mine")

    with pytest.raises(OutputRefused, match=r"out\.batchrun is in the way"):
        Store.open(bench.out)


def test_disk_without_hard_links_is_refused_before_any_work(bench, monkeypatch):
    def link(source: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)

    with pytest.raises(OutputRefused, match="no hard links"), Store.open(bench.out).lock():
        pytest.fail("the lock was granted")

    assert tree(bench.out.parent) == {}


def test_job_that_fails_before_it_has_a_plan_leaves_nothing_behind(tmp_path):
    store = Store.open(tmp_path / "not" / "yet" / "out")

    def fail() -> None:
        with store.lock():
            store.check({"output": "out"}, {"model": "echo"})
            raise ValueError("bad column")

    with pytest.raises(ValueError, match="bad column"):
        fail()

    assert tree(tmp_path) == {}


def test_foreign_files_in_an_unused_job_folder_stay(bench):
    folder = bench.out.with_name("out.batchrun")
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")

    with Store.open(bench.out).lock():
        pass

    assert tree(bench.out.parent) == {"out.batchrun": None, "out.batchrun/notes.txt": b"mine"}



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
    before = tree(bench.out.parent)

    who = f"process {holder.pid} on host {socket.gethostname()}"
    with pytest.raises(StoppedEarly, match=who) as stop, Store.open(bench.out).lock():
        pytest.fail("two processes hold one output")

    assert stop.value.exit_code == 75
    assert "--wait-lock" in str(stop.value)
    assert tree(bench.out.parent) == before


def test_lock_of_a_killed_process_is_free_at_once(bench, holder):
    holder.kill()
    holder.wait()

    with Store.open(bench.out).lock():
        assert json.loads(bench.out.with_name("out.batchrun").joinpath("holder.json").read_text())["pid"] == os.getpid()


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
        assert list(store.at.tmp.iterdir()) == []




def test_different_job_is_refused_with_the_differing_keys_and_nothing_changes(bench):
    with bench.working() as store:
        bench.commit(store, 0, [1, 0])
    before = tree(bench.out.parent)

    store = Store.open(bench.out)
    with pytest.raises(JobMismatch) as mismatch, store.lock():
        store.check({}, {"model": "echo", "temperature": "0.7", "seed": "3"})

    assert mismatch.value.exit_code == 78
    assert mismatch.value.differing == ("inputs", "seed", "temperature")
    assert tree(bench.out.parent) == before


def test_job_that_was_only_planned_gives_way_to_another(bench):
    """Else a mistyped template would need --overwrite although no row was ever computed."""
    with bench.working() as store:
        bench.plan(store, 5)

    store = Store.open(bench.out)
    with store.lock():
        store.check({"limit": 3}, {"model": "other"})
        assert not store.at.plan.exists()
        assert store.job == {"limit": 3}


def test_same_job_with_other_engine_options_goes_on_and_is_stored(bench):
    with bench.working() as store:
        bench.commit(store, 0, [2, 4])
        before = store.job_id
        store.check({"max_num_seqs": 8}, json.loads(store.at.job.read_text())["fingerprint"])

        assert store.job == {"max_num_seqs": 8}
        assert store.job_id == before
        assert store.num_done() == 2


def test_interrupted_overwrite_of_another_job_resumes_instead_of_starting_again(bench):
    with bench.working() as store:
        bench.commit(store, 0, [0])
    with bench.working(overwrite=True, model="new") as store:
        assert store.num_done() == 0
        bench.commit(store, 0, [1, 2])
    with bench.working(overwrite=True, model="new") as store:
        assert store.num_done() == 2


def test_damaged_job_file_is_a_storage_error_with_a_remedy(bench):
    with bench.working() as store:
        bench.commit(store, 0, [0])
        store.at.job.write_text('{"job": ')

    with pytest.raises(StorageFailed, match=r"job\.json is damaged; delete the job folder"), bench.working():
        pytest.fail("the job was accepted")




def test_done_is_the_union_of_the_parts_of_the_unit(bench):
    with bench.working() as store:
        bench.commit(store, 3, [7, 5])
        bench.commit(store, 4, [1])
        bench.commit(store, 3, [6])
    with bench.working() as store:
        assert sorted(store.done(3).tolist()) == [5, 6, 7]
        assert store.done(4).tolist() == [1]
        assert store.done(5).dtype == np.int64
        assert store.done(5).tolist() == []
        assert [part.path.name for part in store.at.list_parts()] == [
            "part-00003-0001.parquet", "part-00003-0002.parquet", "part-00004-0001.parquet",
        ]  # fmt: skip


def test_counts_sum_rows_and_errors_by_type(bench):
    with bench.working() as store:
        bench.commit(store, 0, [0, 1, 2], failed=[1])
        bench.commit(store, 1, [3, 4], failed=[3, 4])

        assert store.counts() == Counts(5, {"empty_prompt": 3})
        assert store.num_done() == 5


def test_counts_are_the_footers_own_even_if_a_text_spells_them(bench):
    """The counts are found by pattern; an answer that contains the pattern must not be taken for them."""
    forged = 'batchrun.counts\x18\x1a{"rows":9999,"errors":{}}'
    with bench.working() as store:
        store.done(0)
        table = bench.results([0, 1])
        store.commit(0, table.set_column(1, "text", [[forged, forged]]))

        assert store.counts() == Counts(2, {})


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty"])
def test_damaged_part_is_named_with_the_remedy_and_deleting_it_frees_its_rows(bench, damage):
    with bench.working() as store:
        path = bench.commit(store, 0, range(100))
        bench.commit(store, 0, [100])
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[40] ^= 0xFF
    path.write_bytes({"truncate": content[: len(content) // 2], "flip": content, "empty": b""}[damage])

    with bench.working() as store:
        with pytest.raises(PartDamaged, match=f"{path.name} is damaged .*; delete this file") as failure:
            store.done(0)
        assert failure.value.exit_code == 74

        path.unlink()
        assert store.done(0).tolist() == [100]


def test_part_of_another_job_is_refused(bench):
    with bench.working() as store:
        bench.commit(store, 0, [0])
        stored = json.loads(store.at.job.read_text())
        stored["fingerprint"]["model"] = "other"
        store.at.job.write_text(json.dumps(stored))

        with pytest.raises(StorageFailed, match="belongs to job"):
            store.done(0)


def test_of_two_writers_of_one_number_exactly_one_wins_and_the_loser_stops(bench):
    with bench.working() as store:
        zombie = Store(store.at, overwrite=False)
        zombie.done(0)
        store.done(0)
        store.commit(0, bench.results([0, 1]))

        with pytest.raises(PartExists, match=r"part-00000-0001\.parquet was written by another worker") as loss:
            zombie.commit(0, bench.results([1, 2]))
        assert loss.value.exit_code == 74

        with pytest.raises(PartExists):
            zombie.commit(0, bench.results([2]))
        assert store.done(0).tolist() == [0, 1]
        assert list(store.at.tmp.iterdir()) == []


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
from batchrun.store.layout import Layout
from batchrun.store.store import PartExists, Store
store, me = Store(Layout(Path(sys.argv[1])), overwrite=False), int(sys.argv[2])
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




def test_partial_tokens_come_back_and_are_replaced_whole(bench):
    with bench.working() as store:
        assert store.load_partial() == {}
        store.save_partial({4: (1, 2, 3), 9: ()})
        assert store.load_partial() == {4: (1, 2, 3), 9: ()}
        store.save_partial({5: (7,)})
    with bench.working() as store:
        assert store.load_partial() == {5: (7,)}
        assert not list(store.at.tmp.iterdir())


def test_damaged_partial_is_named_with_the_remedy(bench):
    with bench.working() as store:
        store.save_partial({4: (1, 2, 3)})
        store.at.partial.write_bytes(store.at.partial.read_bytes()[:60])

        with pytest.raises(StorageFailed, match=r"partial\.arrow is damaged; delete this file"):
            store.load_partial()


def test_progress_is_what_was_written_last_and_nothing_when_damaged(bench):
    with bench.working() as store:
        assert store.read_progress() == {}
        store.write_progress({"status": "in_progress", "rows_s": 1.5})
        assert store.read_progress() == {"status": "in_progress", "rows_s": 1.5}
        store.at.progress.write_bytes(b"\0\0\0")
        assert store.read_progress() == {}
