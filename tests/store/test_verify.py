"""What `verify` finds in OUT afterwards, and that it finds nothing when nothing is wrong."""

import errno
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun.store.verify import verify


@pytest.fixture
def published(bench, inputs, small_files):
    with bench.working() as store:
        bench.plan(store, 300)
        bench.commit_shuffled(store, 300, 4, seed=8)
        bench.publish(store, inputs(300))
    return bench.out


def rewrite(path: Path, change) -> None:
    table = pq.read_table(path)
    pq.write_table(change(table), path)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda table: table.slice(1), "row_idx 1 where 0 was due"),
        (lambda table: pa.concat_tables([table, table.slice(188)]), "row_idx 188 where 189 was due"),
        (lambda table: table.take([1, 0, *range(2, 189)]), "row_idx 1 where 0 was due"),
        (lambda table: table.slice(0, 188), "row_idx 189 where 188 was due"),
        (lambda table: table.drop_columns("name"), "has other columns"),
        (lambda table: table.drop_columns("row_idx"), "no column row_idx"),
        (lambda table: table.set_column(2, "text", [["edited"] * 189]), "has been changed"),
    ],
    ids=["first row gone", "row twice", "order", "last row gone", "column gone", "no index", "value"],
)
def test_verify_finds_what_was_changed(published, change, found):
    assert verify(published).problems == ()

    rewrite(published / "part-00000.parquet", change)

    problems = verify(published).problems
    assert any("has been changed since it was written (its sha256 differs)" in problem for problem in problems)
    assert any(found in problem for problem in problems)


def test_verify_finds_missing_damaged_and_foreign_files(published):
    (published / "part-00001.parquet").unlink()
    (published / "part-00002.parquet").write_bytes(b"")
    first = published / "part-00000.parquet"
    first.write_bytes(first.read_bytes()[:-9])

    report = verify(published)

    assert not report.is_ok
    told = "\n".join(report.problems)
    assert "part-00001.parquet is missing" in told
    assert "part-00000.parquet cannot be read" in told
    assert "part-00002.parquet is not part of the result; move it away" in told
    assert "0 rows instead of the 300 that were planned" in told


def test_verify_counts_rows_and_failures(published):
    report = verify(published)

    assert report.is_ok
    assert (report.num_rows, report.num_planned, report.num_failed, report.num_files) == (300, 300, 28, 2)


def test_verify_says_how_much_of_an_unfinished_job_is_done(bench):
    with bench.working() as store:
        bench.plan(store, 9)
        bench.commit(store, 0, [3, 1])

    report = verify(bench.out)

    assert report.problems == (
        f"{bench.out} is not complete: 2 of 9 rows have a result; batchrun resume {bench.out} goes on",
    )


def test_verify_reads_without_permission_to_write(published):
    for path in (published, *published.iterdir()):
        path.chmod(0o555)
    assert verify(published).is_ok
    published.chmod(0o755)


def test_a_result_that_cannot_be_listed_is_a_problem_and_no_traceback(published, monkeypatch):
    def refuse(path, pattern):
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(Path, "rglob", refuse)

    assert verify(published).problems[0] == f"{published} cannot be listed: Input/output error"
