"""One job in a folder, which of its rows are done, and what is kept beside them."""

import json

import numpy as np
import pytest

from batchrun.errors import JobMismatch, StorageFailed
from batchrun.store.counts import Counts, PartDamaged
from batchrun.store.store import Store


def test_different_job_is_refused_with_the_differing_keys_and_nothing_changes(bench):
    with bench.working() as store:
        bench.commit(store, 0, [1, 0])
    before = bench.tree()

    store = Store.open(bench.out)
    with pytest.raises(JobMismatch) as mismatch, store.lock():
        store.check({}, {"model": "echo", "temperature": "0.7", "seed": "3"})

    assert mismatch.value.exit_code == 78
    assert mismatch.value.differing == ("inputs", "seed", "temperature")
    assert bench.tree() == before


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


def test_partial_tokens_come_back_and_are_replaced_whole(bench):
    with bench.working() as store:
        assert store.load_partial() == {}
        store.save_partial({4: (1, 2, 3), 9: ()})
        assert store.load_partial() == {4: (1, 2, 3), 9: ()}
        store.save_partial({5: (7,)})
    with bench.working() as store:
        assert store.load_partial() == {5: (7,)}
        assert not list(store.tmp.iterdir())


def test_suspects_are_counted_by_process_however_often_they_ran_in_it(bench):
    """A row may run as several sequences."""
    with bench.working() as store:
        store.suspect([4, 9, 4, 4])
        store.suspect([4])
        assert store.load_suspects() == {4: 2, 9: 1}


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
