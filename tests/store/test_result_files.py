"""The files of OUT: folders by a column's values, and a result without rows, through everything that reads Parquet."""

import datasets
import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from batchrun.errors import DataError, OutputRefused
from batchrun.store.result_files import Shape, check_partitions, partition_folder
from batchrun.store.status import status
from batchrun.store.store import Store
from batchrun.store.verify import verify


def test_folders_by_a_columns_values_are_whole_in_order_and_readable(bench, small_files):
    """Text that has to be quoted, a null and a value that appears late among them."""
    names = [["en", "a/b c", None, "de"][row % 4 if row > 30 else row % 3] for row in range(600)]
    batch = pa.record_batch({"row_idx": range(600), "lang": pa.array(names, pa.string()), "id": range(600)})
    with bench.working() as store:
        bench.plan(store, 600)
        bench.commit_shuffled(store, 600, 9, seed=3)
        bench.publish(store, [batch], shape=Shape("lang"))
        assert store.is_complete

    folders = sorted(path.name for path in bench.out.iterdir())
    assert folders == ["lang=__HIVE_DEFAULT_PARTITION__", "lang=a%2Fb%20c", "lang=de", "lang=en"]
    assert verify(bench.out).problems == ()
    assert (verify(bench.out).num_rows, status(bench.out).status) == (600, "completed")
    for folder in bench.out.iterdir():
        rows = pq.read_table(folder, partitioning=None)
        assert "lang" not in rows.column_names
        assert rows.column("row_idx").to_pylist() == sorted(rows.column("row_idx").to_pylist())
    expected = [(row, name) for row, name in enumerate(names)]
    read = ds.dataset(str(bench.out), partitioning="hive").to_table().sort_by("row_idx")
    assert list(zip(read.column("row_idx").to_pylist(), read.column("lang").to_pylist(), strict=True)) == expected
    found = duckdb.sql(f"SELECT row_idx, lang FROM '{bench.out}/**/*.parquet' ORDER BY row_idx").fetchall()
    assert found == expected
    loaded = datasets.load_dataset(str(bench.out), split="train", cache_dir=str(bench.out.with_name("cache")))
    assert sorted(loaded["row_idx"]) == list(range(600))


def test_verify_finds_a_row_that_is_missing_in_a_folder_or_out_of_order(bench):
    batch = pa.record_batch({"row_idx": range(9), "lang": ["a", "b", "c"] * 3})
    with bench.working() as store:
        bench.plan(store, 9)
        bench.commit(store, 0, range(9))
        bench.publish(store, [batch], shape=Shape("lang"))
    path = bench.out / "lang=b" / "part-00000.parquet"
    whole = pq.read_table(path, partitioning=None)
    pq.write_table(whole.take([1, 0, 2]), path)
    assert any("not in the input's order" in problem for problem in verify(bench.out).problems)
    pq.write_table(whole.slice(1), path)
    assert any("twice or missing" in problem for problem in verify(bench.out).problems)
    (bench.out / "lang=b" / "notes.txt").write_text("mine")
    assert any("notes.txt is not part of the result" in problem for problem in verify(bench.out).problems)
    with pytest.raises(OutputRefused, match=r"holds lang=b/notes.txt, which is not part of the result"):
        Store.open(bench.out)


@pytest.mark.parametrize(
    ("values", "message"),
    [(pa.array([1.5]), "is double; folders need text"), (pa.array([[1]]), "is list"),
     (pa.array(range(501)), "more than 500 values"), (pa.array(["a", ""]), "has empty values"),
     (pa.array(["a", "語" * 28]), "has the value '語語.*語', whose folder's name is 257 bytes long; 255 are"),
     (pa.array([None, "__HIVE_DEFAULT_PARTITION__"]), "has the value '__HIVE_DEFAULT_PARTITION__', .* for null")],
)  # fmt: skip
def test_columns_that_cannot_be_folders_are_refused(values, message):
    with pytest.raises(DataError, match=f"--partition-by: column 'lang' {message}|{message}"):
        check_partitions(values, "lang")
    check_partitions(pa.array([True, None]), "lang")
    check_partitions(pa.array(["語" * 27, "a" * 250]), "lang")
    assert partition_folder("a b", pa.scalar(7)) == "a%20b=7"


@pytest.mark.parametrize("by", [None, "lang"])
def test_no_rows_give_a_valid_empty_dataset_with_every_column(bench, by):
    schema = pa.schema([("row_idx", pa.int64()), ("lang", pa.string()), ("id", pa.int64())])
    with bench.working() as store:
        bench.plan(store, 0)
        bench.publish(store, schema.empty_table().to_batches(), pa.schema(list(schema)[1:]), shape=Shape(by))
        assert store.is_complete
    assert verify(bench.out).problems == ()
    names = ["lang", "id", *bench.results([]).schema.names]
    assert pq.read_table(bench.out).schema.names == names
    found = duckdb.sql(f"SELECT * FROM '{bench.out}/**/*.parquet'")
    assert (found.columns, found.fetchall()) == (names, [])
    # Without streaming, datasets loads no split that has no rows, whatever it was made of.
    loaded = datasets.load_dataset(str(bench.out), split="train", streaming=True)
    assert (list(loaded.features), list(loaded)) == (names, [])
