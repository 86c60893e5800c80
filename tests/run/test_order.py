"""`--order run`: rows as they were answered, each once and with its own columns."""

import json

import pyarrow.parquet as pq
import pytest

import batchrun as br
from batchrun.errors import JobMismatch, StorageFailed, UsageError
from batchrun.retry import retry
from batchrun.stop import StopRequest
from batchrun.store.export import export
from batchrun.store.layout import Layout
from batchrun.store.verify import verify
from tests.run.conftest import ignore
from tests.run.test_reuse import day


def by_index(rows):
    return sorted(rows, key=lambda row: row["row_idx"])


def test_rows_are_those_of_the_usual_order_and_lie_as_the_parts_do(echo_job, tmp_path):
    usual, as_answered = (echo_job(200, tmp_path / name) for name in ("usual", "answered"))
    usual.submit(max_num_seqs=4, checkpoint_every="0.001s")
    as_answered.submit(max_num_seqs=4, checkpoint_every="0.001s", order="run")
    rows, parts = as_answered.rows(), Layout(as_answered.out).list_parts()
    assert by_index(rows) == usual.rows()
    committed = [row for part in parts for row in pq.read_table(part.path).column("row_idx").to_pylist()]
    assert [row["row_idx"] for row in rows] == committed != sorted(committed)
    assert pq.read_schema(as_answered.out / "part-00000.parquet").equals(
        pq.read_schema(usual.out / "part-00000.parquet")
    )
    report = verify(as_answered.out)
    assert (report.problems, report.num_rows) == ((), 200)


def test_rows_that_are_missing_or_there_twice_are_found_by_publication_and_by_verify(echo_job):
    job = echo_job(40)
    job.submit(order="run")
    file = job.out / "part-00000.parquet"
    table = pq.read_table(file)
    pq.write_table(table.slice(0, 39), file)
    assert any("39 rows instead of the 40" in problem for problem in verify(job.out).problems)
    pq.write_table(table.take([0, *range(39)]), file)
    assert "a row is there twice or missing" in verify(job.out).problems
    part = Layout(job.out).list_parts()[0].path
    twice = part.with_name("part-00000-0077.parquet")
    twice.write_bytes(part.read_bytes())
    job.out.rename(job.folder / "aside")
    with pytest.raises(StorageFailed, match=r"more than one result for row_idx 0, 1, .*part-00000-0077"):
        job.submit(order="run")
    twice.unlink()
    job.submit(order="run")
    assert verify(job.out).is_ok


def test_export_gives_the_inputs_order_and_a_retry_keeps_the_jobs_own(echo_job):
    job = echo_job(60)
    job.submit(order="run", max_tokens=5)
    target = job.folder / "rows.jsonl"
    export(job.out, "jsonl", target)
    lines = [json.loads(line) for line in target.read_text().splitlines()]
    assert [line["row_idx"] for line in lines] == list(range(60))
    assert [line["prompt"] for line in lines] == job.prompts
    assert retry(job.out, "row_idx < 10", {"max_tokens": 9}, ignore, StopRequest()).retried == 10
    assert [row["row_idx"] for row in job.rows()][-10:] != list(range(50, 60))
    assert verify(job.out).is_ok


def test_folders_by_value_and_another_order_of_a_job_with_answers(tmp_path):
    job = day(tmp_path / "job", ["c", "a", "b", "a"], kind=["x", "y", "x", "y"])
    job.submit(order="run", partition_by="kind")
    assert verify(job.out).is_ok
    with pytest.raises(JobMismatch, match="differing: order"):
        job.submit(partition_by="kind")


def test_generate_keeps_the_order_of_what_it_was_given():
    with pytest.raises(UsageError, match="order is for submit"):
        br.generate(object(), order="run")
