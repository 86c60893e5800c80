"""A sample of a result computed once more, beside it."""

import json
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun import opened
from batchrun.errors import InputMissing, JobMismatch, UsageError
from batchrun.rerun import Difference, rerun, share_of
from batchrun.retry import retry
from batchrun.stop import StopRequest
from batchrun.store.layout import Layout
from tests.run.conftest import echo_text, ignore
from tests.run.test_reuse import day


def again(job, share):
    return rerun(job.out, share, ignore, StopRequest())


def test_all_rows_of_a_result_come_out_the_same(echo_job):
    """Sampled rows too, and rows that were retried with other parameters."""
    job = echo_job(150)
    job.submit(temperature=0.8, seed=3)
    retry(job.out, "row_idx < 20", {"max_tokens": 5, "temperature": 0.0}, ignore, StopRequest())
    before = {path: path.read_bytes() for path in job.folder.rglob("*") if path.is_file()}
    found = again(job, 1.0)
    assert (found.rows, found.differences, found.match_rate) == (150, (), 1.0)
    assert {path: path.read_bytes() for path in job.folder.rglob("*") if path.is_file()} == before


def test_a_share_is_a_sample_of_the_rows_that_did_not_fail(tmp_path):
    job = day(tmp_path / "job", ["", *(f"Prompt {row}" for row in range(99))])
    job.submit()
    assert again(job, 0.1).rows == 10
    assert again(job, 1.0).rows == 99
    assert again(job, 0.0001).rows == 1


def test_a_model_or_an_input_that_has_changed_since_is_not_compared(tmp_path, monkeypatch):
    job = day(tmp_path / "job", ["one", "two"])
    job.submit()
    known = opened.find_model(job.job())
    other = replace(known, spec=replace(known.spec, digest="changed"))
    with monkeypatch.context() as patched:
        patched.setattr(opened, "find_model", lambda _: other)
        with pytest.raises(JobMismatch, match=r"differing: model\)"):
            again(job, 1.0)
    day(tmp_path / "job", ["one", "three"])
    with pytest.raises(JobMismatch, match=r"differing: inputs\)"):
        again(job, 1.0)


def test_a_text_that_differs_is_told_by_row_and_token(tmp_path):
    job = day(tmp_path / "job", ["one", "two"])
    job.submit(max_tokens=20)
    (part,) = Layout(job.out).list_parts()
    table, text = pq.read_table(part.path), echo_text("two", 20)
    at = table.column("row_idx").to_pylist().index(1)
    texts = [*table.column("text").to_pylist()]
    texts[at] = text[:3] + "~" + text[4:]
    pq.write_table(table.set_column(1, "text", pa.array(texts)), part.path)
    found = again(job, 1.0)
    assert found.differences == (Difference(1, 3, texts[at], text),)
    assert found.match_rate == 0.5


def test_a_result_of_failed_rows_only_has_nothing_to_compare(tmp_path):
    job = day(tmp_path / "job", ["", ""])
    job.submit()
    assert again(job, 1.0).rows == 0


def test_the_command_reports_the_match_rate_and_refuses_what_is_no_rate(tmp_path):
    job = day(tmp_path / "job", [f"Prompt {row}" for row in range(9)])
    with pytest.raises(InputMissing, match="no job at"):
        again(job, 1.0)
    job.submit()
    shown = job.call("verify", str(job.out), "--rerun", "50%")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.splitlines()[-1].split(maxsplit=1) == ["again", "4 of 4 rows have the same text (100.00%)"]
    found = json.loads(job.call("verify", str(job.out), "--rerun", "1", "--json").stdout)
    assert (found["is_ok"], found["rerun"]["rows"], found["rerun"]["match_rate"]) == (True, 9, 1.0)
    for text in ("0", "150%", "some"):
        with pytest.raises(UsageError, match="--rerun should be a rate above 0"):
            share_of(text)
