"""A look at a job while another process works on it, and after that process is gone."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from batchrun.errors import InputMissing, OutputRefused, StorageFailed
from batchrun.store.counts import PartDamaged
from batchrun.store.layout import LEASE_S
from batchrun.store.status import Holder, RequestCounts, status
from batchrun.store.store import Store

ROOT = Path(__file__).parents[2]


def test_no_job_is_input_missing(bench):
    with pytest.raises(InputMissing, match=r"no job at .*out\.batchrun; batchrun submit creates one"):
        status(bench.out)


def test_job_folder_that_may_not_be_searched_is_a_storage_error(bench, monkeypatch):
    """As os.stat answers below a folder without the x permission; root, who may run this test, is never refused."""

    def refuse(path: object, **_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "stat", refuse)

    with pytest.raises(StorageFailed, match="Permission denied"):
        status(bench.out)
    with pytest.raises(OutputRefused, match=r"cannot create .*Permission denied; choose another -o"):
        Store.open(bench.out)


def test_words_from_plan_to_completion(bench, inputs):
    seen = []
    with bench.working() as store:
        bench.plan(store, 3)
        seen.append(status(bench.out))
        bench.commit(store, 0, [0, 2], failed=[2])
        store.write_progress({"status": "in_progress", "rows_s": 2.5})
        seen.append(status(bench.out))
        bench.commit(store, 0, [1])
        seen.append(status(bench.out))
        bench.publish(store, inputs(3))
        seen.append(status(bench.out))
    seen.append(status(bench.out))

    assert [look.status for look in seen] == ["in_progress", "in_progress", "finalizing", "completed", "completed"]
    assert [look.request_counts for look in seen] == [
        RequestCounts(3, 0, 0), RequestCounts(3, 1, 1), RequestCounts(3, 2, 1), RequestCounts(3, 2, 1),
        RequestCounts(3, 2, 1),
    ]  # fmt: skip
    assert seen[1].errors == {"empty_prompt": 1}
    assert seen[1].progress == {"status": "in_progress", "rows_s": 2.5}
    assert seen[1].progress_at == pytest.approx(time.time(), abs=60)
    assert [look.holder is None for look in seen] == [False, False, False, False, True]
    assert seen[1].to_dict()["request_counts"] == {"total": 3, "completed": 1, "failed": 1}


def test_job_that_is_being_planned_is_validating_and_planned_afterwards(bench):
    """A finished plan was "validating" for ever."""
    with bench.working() as store:
        (store.at.plan / "plan.json").unlink()
        store.at.plan.rmdir()
        look = status(bench.out)
        assert (look.status, look.request_counts.total) == ("validating", None)
        bench.plan(store, 4)
    look = status(bench.out)
    assert (look.status, look.request_counts.total) == ("planned", 4)
    (bench.out.with_name("out.batchrun") / "plan" / "plan.json").unlink()
    (bench.out.with_name("out.batchrun") / "plan").rmdir()
    assert status(bench.out).status == "interrupted"


@pytest.mark.parametrize(
    ("said", "ended"),
    [
        (None, "interrupted"),
        ("in_progress", "interrupted"),
        ("finalizing", "interrupted"),
        ("cancelled", "cancelled"),
        ("failed", "failed"),
        ("nonsense", "interrupted"),
    ],
)
@pytest.mark.parametrize("num_rows", [2, 3])
def test_job_that_nobody_holds_ended_as_it_said_or_without_a_word(bench, said, ended, num_rows):
    """Also when every row has a result: nobody is finalizing it."""
    with bench.working() as store:
        bench.plan(store, num_rows)
        bench.commit(store, 0, [0, 1])
        if said:
            store.write_progress({"status": said})

    assert status(bench.out).status == ended


@pytest.mark.parametrize("said", ["finalizing", None])
def test_published_result_that_is_gone_is_output_missing(bench, inputs, said):
    """It was "failed", with 3 of 3 rows."""
    with bench.working() as store:
        bench.plan(store, 3)
        bench.commit(store, 0, [0, 1, 2])
        if said:
            store.write_progress({"status": said})
        bench.publish(store, inputs(3))
    (bench.out / "part-00000.parquet").unlink()
    assert status(bench.out).status == "output_missing"
    bench.out.rmdir()
    assert status(bench.out).status == "output_missing"
    with bench.working() as store:
        assert status(bench.out).status == "finalizing"
        bench.publish(store, inputs(3))
    assert status(bench.out).status == "completed"


def test_killed_before_the_result_was_out_is_interrupted(bench, inputs, monkeypatch):
    with bench.working() as store:
        bench.plan(store, 3)
        bench.commit(store, 0, [0, 1, 2])
        monkeypatch.setattr(Store, "reveal", lambda self: None)
        bench.publish(store, inputs(3))
    assert status(bench.out).status == "interrupted"


def test_cancelling_while_it_is_held(bench):
    with bench.working() as store:
        bench.plan(store, 3)
        store.at.cancel.touch()

        assert status(bench.out).status == "cancelling"


def test_damaged_part_is_named(bench):
    with bench.working() as store:
        path = bench.commit(store, 0, [0])
    path.write_bytes(path.read_bytes()[:-1])

    with pytest.raises(PartDamaged, match=f"{path.name} is damaged .not a whole Parquet file.; delete this file"):
        status(bench.out)


def test_footer_longer_than_the_first_read_is_counted(bench, monkeypatch):
    monkeypatch.setattr("batchrun.store.counts._TAIL_BYTES", 50)
    with bench.working() as store:
        bench.commit(store, 0, [0, 1, 2], failed=[0])

    assert status(bench.out).request_counts == RequestCounts(0, 2, 1)


HOLD = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from conftest import Bench
bench = Bench(Path(sys.argv[1]))
with bench.working() as store:
    bench.plan(store, 7)
    bench.commit(store, 0, [5, 3])
    store.write_progress({"status": "in_progress"})
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(bench):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(bench.out), str(Path(__file__).parent)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    with process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_status_names_the_other_process_while_it_lives_and_not_after_it_was_killed(bench, holder):
    look = status(bench.out)
    assert (look.status, look.request_counts) == ("in_progress", RequestCounts(7, 2, 0))
    assert look.holder is not None
    assert look.holder == Holder(holder.pid, look.holder.host)

    holder.kill()
    holder.wait()

    look = status(bench.out)
    assert (look.status, look.holder, look.request_counts) == ("interrupted", None, RequestCounts(7, 2, 0))


def test_holder_that_went_silent_is_none_and_one_of_another_machine_is_known_by_its_signs_of_life(bench):
    with bench.working() as store:
        store.at.holder.write_text('{"pid": 4121, "host": "gpu7"}')
        assert status(bench.out).holder == Holder(4121, "gpu7")

        long_ago = store.at.lock.stat().st_mtime - LEASE_S - 1
        os.utime(store.at.lock, (long_ago, long_ago))
        assert status(bench.out).holder is None


def test_status_imports_nothing_heavy(bench):
    with bench.working() as store:
        bench.commit(store, 0, [0])
    code = f"""
import sys
from pathlib import Path
from batchrun.store.status import status
status(Path({str(bench.out)!r}))
print(sorted({{"pyarrow", "numpy", "duckdb", "filelock", "torch", "transformers", "pydantic"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "[]\n"
