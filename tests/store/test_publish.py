"""From parts to OUT: input order, every row once, the input's columns untouched, memory bounded."""

import hashlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun.errors import StorageFailed
from batchrun.store import publish as publishing
from batchrun.store import result_files
from batchrun.store.counts import PartDamaged
from batchrun.store.merge import MergedParts
from batchrun.store.publish import publish
from batchrun.store.result_files import Shape
from batchrun.store.verify import verify


@pytest.mark.parametrize("num_batches", [1, 4])
def test_input_order_is_restored_from_shuffled_parts(bench, inputs, num_batches):
    with bench.working() as store:
        bench.commit_shuffled(store, 997, 13, seed=1)
        num_rows = bench.publish(store, inputs(997, num_batches))

    assert num_rows == 997
    expected = bench.results(range(997), failed=range(0, 997, 11))
    expected = expected.add_column(0, "name", [[f"row {row}" for row in range(997)]])
    assert pq.read_table(bench.out).replace_schema_metadata() == expected
    assert [path.name for path in bench.out.iterdir()] == ["part-00000.parquet"]


@pytest.mark.parametrize("run_bytes", [1, 700, 5_000, 1 << 30])
def test_merged_windows_equal_one_sort_of_everything(bench, tmp_path, run_bytes):
    with bench.working() as store:
        bench.commit_shuffled(store, 331, 17, seed=run_bytes)
        schema = bench.results([]).schema
        merged = MergedParts(store.at.list_parts(), schema, tmp_path, run_bytes)
        windows = [merged.take(stop) for stop in (0, 1, 64, 64, 200, 330, 331)]

    assert merged.num_left == 0
    assert pa.concat_tables(windows) == bench.results(range(331), failed=range(0, 331, 11))
    assert bool(list(tmp_path.glob("run-*.arrow"))) == (run_bytes < 1 << 30)


def awkward_columns() -> pa.Table:
    """Input columns of the types that are easily lost: nested, dictionary, null, binary, bytes that are no UTF-8."""
    bad = pa.array([b"\xff\xfe", b"ok", None, b"", b"\xc3("], pa.binary())
    points = pa.struct([("x", pa.int8()), ("tags", pa.list_(pa.string()))])
    return pa.table(
        {
            "bad": pa.StringArray.from_buffers(5, bad.buffers()[1], bad.buffers()[2], bad.buffers()[0]),
            "kind": pa.array(["a", "b", None, "a", "c"]).dictionary_encode(),
            "messages": pa.array(
                [[{"role": "user", "content": "hi"}], [], None, [None], [{"role": None, "content": ""}]],
                pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])),
            ),
            "point": pa.array([{"x": 1, "tags": ["p", None]}, None, {"x": None, "tags": None}, None, None], points),
            "vector": pa.array([[1.0, float("nan")]] * 5, pa.list_(pa.float32(), 2)),
            "when": pa.array([0, 1, None, 2**40, -1], pa.timestamp("ns", "Europe/Paris")),
            "price": pa.array([None, 1, 2, 3, 4], pa.int64()).cast(pa.decimal128(21, 2)),
            "nothing": pa.nulls(5),
            "large": pa.array(["ä", "🦉", None, "", "x" * 300], pa.large_string()),
            "bits": pa.array([True, None, False, True, None]),
        }
    )


def test_input_columns_pass_through_unchanged_whatever_their_type(bench):
    table = awkward_columns()
    indexed = table.add_column(0, "row_idx", [range(5)])
    with bench.working() as store:
        bench.commit_shuffled(store, 5, 3, seed=2)
        # Two batches, as from two files, whose dictionaries differ.
        first, second = indexed.slice(0, 2), indexed.slice(2)
        kind = second.column("kind").cast(pa.string()).dictionary_encode()
        second = second.set_column(2, "kind", kind)
        batches = [piece.combine_chunks().to_batches()[0] for piece in (first, second)]
        bench.publish(store, batches)

    out = pq.read_table(bench.out)
    assert out.schema.names == [*table.schema.names, "row_idx", "text", "completion_tokens", "error"]
    assert [field.type for field in out.schema][:10] == [field.type for field in table.schema]
    for name in table.schema.names:
        want, got = table.column(name), out.column(name)
        if name == "bad":
            want, got = want.cast(pa.binary()), got.cast(pa.binary())
        if name == "vector":
            want, got = (np.array(column.to_pylist()) for column in (want, got))
            np.testing.assert_array_equal(got, want)
            continue
        assert got.to_pylist() == want.to_pylist(), name


def test_invalid_utf8_keeps_its_bytes(bench):
    with bench.working() as store:
        bench.commit(store, 0, range(5))
        bench.publish(store, awkward_columns().add_column(0, "row_idx", [range(5)]).to_batches())

    column = pq.read_table(bench.out).column("bad").cast(pa.binary())
    assert column.to_pylist() == [b"\xff\xfe", b"ok", None, b"", b"\xc3("]


def test_only_kept_columns_are_published_even_one_that_is_called_like_the_index(bench):
    batch = pa.RecordBatch.from_arrays(
        [pa.array([0, 1]), pa.array(["a", "b"]), pa.array([8, 9]), pa.array([0.5, 1.5])],
        names=["row_idx", "dropped", "row_idx", "kept"],
    )
    schema = bench.results([]).schema
    renamed = pa.schema([field.with_name("br_" + field.name) for field in schema])
    with bench.working() as store:
        store.done(0)
        store.commit(0, bench.results([1, 0]).rename_columns(renamed.names))
        kept = pa.schema([("kept", pa.float64()), ("row_idx", pa.int64())])
        publish(store, [batch], kept, renamed, {})

    out = pq.read_table(bench.out)
    assert out.select(["kept", "row_idx", "br_row_idx", "br_text"]).to_pylist() == [
        {"kept": 0.5, "row_idx": 8, "br_row_idx": 0, "br_text": "answer 0"},
        {"kept": 1.5, "row_idx": 9, "br_row_idx": 1, "br_text": "answer 1"},
    ]
    assert "dropped" not in out.schema.names


EMPTY_BATCH = pa.record_batch({"row_idx": pa.array([], pa.int64()), "name": pa.array([], pa.string())})


@pytest.mark.parametrize("batches", [[], [EMPTY_BATCH]])
def test_zero_rows_become_one_valid_empty_file(bench, batches):
    with bench.working() as store:
        bench.plan(store, 0)
        bench.publish(store, batches, kept=pa.schema([("name", pa.string())]))

    out = pq.read_table(bench.out)
    assert out.num_rows == 0
    assert out.schema.names == ["name", "row_idx", "text", "completion_tokens", "error"]
    assert [path.name for path in bench.out.iterdir()] == ["part-00000.parquet"]
    assert verify(bench.out).problems == ()


def test_missing_rows_are_named_and_out_stays_absent(bench, inputs):
    with bench.working() as store:
        bench.commit(store, 0, [0, 2, 3])

        with pytest.raises(StorageFailed, match=r"no result for row_idx 1, 4, 5, 6, 7 … .8 rows.*run the same command"):
            bench.publish(store, inputs(11))

        assert not bench.out.exists()
        assert list(store.tmp.iterdir()) == []


def test_duplicate_rows_are_named_with_the_parts_that_hold_them(bench, inputs):
    with bench.working() as store:
        bench.commit(store, 0, [0, 2])
        bench.commit(store, 1, [1, 2, 0])

        with pytest.raises(
            StorageFailed, match=r"more than one result for row_idx 0, 2, in part-00000-0001.*part-00001-0001"
        ):
            bench.publish(store, inputs(3))
        assert not bench.out.exists()


@pytest.mark.parametrize(("stranger", "named"), [(7, "from row_idx 3 on"), (-1, "row_idx -1")])
def test_results_without_an_input_row_are_refused(bench, inputs, stranger, named):
    with bench.working() as store:
        bench.commit(store, 0, [0, 1, 2, stranger])

        with pytest.raises(StorageFailed, match=f"1 results .{named}. belong to no row of the input: it has changed"):
            bench.publish(store, inputs(3))


@pytest.mark.parametrize("damage", ["truncated", "flipped", "other columns"])
def test_damaged_part_stops_the_publication_and_is_named(bench, inputs, damage):
    with bench.working() as store:
        path = bench.commit(store, 0, range(200))
        content = bytearray(path.read_bytes())
        content[len(content) // 3] ^= 1
        if damage == "other columns":
            pq.write_table(bench.results(range(200)).drop_columns("text"), path)
        else:
            path.write_bytes(content if damage == "flipped" else content[:300])

        with pytest.raises(PartDamaged, match=path.name):
            bench.publish(store, inputs(200))
        assert not bench.out.exists()


def test_files_have_a_bounded_number_of_rows_and_follow_each_other(bench, inputs, small_files):
    with bench.working() as store:
        bench.plan(store, 600)
        bench.commit_shuffled(store, 600, 9, seed=3)
        bench.publish(store, inputs(600, 5))

    files = sorted(bench.out.iterdir())
    assert [file.name for file in files] == [f"part-{i:05d}.parquet" for i in range(4)]
    assert [pq.read_metadata(file).num_rows for file in files] == [189, 189, 189, 33]
    assert verify(bench.out).problems == ()


def test_files_have_a_bounded_size(bench, inputs, monkeypatch):
    monkeypatch.setattr(publishing, "_WINDOW_ROWS", 50)
    monkeypatch.setattr(result_files, "_GROUP_BYTES", 4_000)
    with bench.working() as store:
        bench.commit_shuffled(store, 3000, 4, seed=4)
        bench.publish(store, inputs(3000), shape=Shape(file_bytes=8_000))

    sizes = [file.stat().st_size for file in sorted(bench.out.iterdir())]
    assert len(sizes) > 3
    # A file is closed after the group that fills it: one group and the footer may be above the limit.
    assert all(8_000 <= size < 20_000 for size in sizes[:-1])
    assert pq.read_table(bench.out).column("row_idx").to_pylist() == list(range(3000))


def test_published_bytes_depend_neither_on_the_parts_nor_on_the_input_batches(tmp_path, bench, inputs, small_files):
    digests = set()
    for seed, num_parts, num_batches in [(5, 1, 1), (6, 7, 3), (7, 40, 11)]:
        other = type(bench)(tmp_path / str(seed) / "out")
        with other.working() as store:
            other.commit_shuffled(store, 500, num_parts, seed)
            other.publish(store, inputs(500, num_batches))
        files = b"".join(path.read_bytes() for path in sorted(other.out.iterdir()))
        digests.add(hashlib.sha256(files).hexdigest())
    assert len(digests) == 1


def test_footer_carries_the_job_and_what_the_caller_adds(bench, inputs):
    with bench.working() as store:
        bench.commit(store, 0, [0])
        bench.publish(store, inputs(1))
        footer = pq.read_metadata(bench.out / "part-00000.parquet").metadata

        assert footer[b"batchrun.job_id"].decode() == store.job_id
        assert footer[b"batchrun.model"] == b"echo"


def test_old_answers_stay_readable_until_the_new_ones_are_there(bench, inputs):
    with bench.working() as store:
        bench.commit(store, 0, [0])
        bench.publish(store, inputs(1))
    old = (bench.out / "part-00000.parquet").read_bytes()

    with bench.working(overwrite=True, model="new") as store:
        assert not store.is_complete
        bench.commit(store, 0, [1, 0])
        assert (bench.out / "part-00000.parquet").read_bytes() == old
        bench.publish(store, inputs(2))
        assert store.is_complete

    assert pq.read_table(bench.out).column("text").to_pylist() == ["answer 0", "answer 1"]
    assert not store.at.replaced.exists()


def test_overwriting_a_complete_job_of_the_same_fingerprint_computes_it_again(bench, inputs):
    with bench.working() as store:
        bench.commit(store, 0, [0])
        bench.publish(store, inputs(1))
    with bench.working() as store:
        assert store.is_complete
        assert store.done(0).tolist() == [0]
    with bench.working(overwrite=True) as store:
        assert not store.is_complete
        assert store.done(0).tolist() == []


def test_memory_does_not_grow_with_the_job(bench, tmp_path, monkeypatch):
    """64 MB of answers through runs and row groups of 2 MB: a publication that gathers them would hold them all."""
    num_rows, text = 16_000, "x" * 4_000
    monkeypatch.setattr(publishing, "_WINDOW_ROWS", 100)
    monkeypatch.setattr(result_files, "_GROUP_BYTES", 2 << 20)
    monkeypatch.setattr(
        publishing, "MergedParts", lambda parts, schema, spill: MergedParts(parts, schema, spill, run_bytes=2 << 20)
    )
    with bench.working() as store:
        for start in range(0, num_rows, 200):
            rows = [num_rows - 1 - row for row in range(start, start + 200)]
            store.done(0)
            store.commit(0, bench.results(rows).set_column(1, "text", [[text] * 200]))
        batches = (pa.record_batch({"row_idx": range(start, start + 500)}) for start in range(0, num_rows, 500))
        before = pa.default_memory_pool()
        pool = pa.proxy_memory_pool(before)
        pa.set_memory_pool(pool)
        try:
            publish(store, batches, pa.schema([]), bench.results([]).schema, {})
        finally:
            pa.set_memory_pool(before)

    assert pool.max_memory() < 24 << 20
    assert sum(pq.read_metadata(file).num_rows for file in bench.out.iterdir()) == num_rows
