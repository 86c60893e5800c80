"""A result in the forms that other tools take."""

import datetime
import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun.errors import DataError, InputMissing, OutputRefused
from batchrun.store.export import export
from tests.run.conftest import echo_text
from tests.run.test_reuse import day

PROMPTS = ["one", "", "three", "fünf"]
COLUMNS = {
    "name": ["a", "b", "c", "d"],
    "when": [datetime.datetime(2026, 1, 2, 3, 4)] * 4,
    "score": [1.5, float("nan"), None, 2.0],
    "raw": [b"\x00\xff"] * 4,
    "tags": [["x", None], [], None, ["y"]],
    "lang": ["en", "de", "en", "de"],
}


@pytest.fixture(params=[None, "lang"], ids=["files", "folders"])
def job(request, tmp_path):
    made = day(tmp_path / "job", PROMPTS, **COLUMNS)
    made.submit(max_tokens=20, id_col="name", partition_by=request.param)
    return made


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_json_lines_have_every_column_of_every_row(job, tmp_path):
    written = export(job.out, "jsonl", tmp_path / "rows.jsonl")
    rows = lines(tmp_path / "rows.jsonl")
    assert (written.num_rows, [row["row_idx"] for row in rows]) == (4, [0, 1, 2, 3])
    assert rows[3]["prompt"] == "fünf"
    assert rows[3]["text"] == echo_text("fünf", 20)
    assert rows[1]["error"]["type"] == "empty_prompt"
    assert [row["score"] for row in rows] == [1.5, None, None, 2.0]
    assert rows[0]["when"] == "2026-01-02T03:04:00"
    assert (rows[0]["raw"], rows[0]["tags"]) == ("AP8=", ["x", None])
    assert [row["lang"] for row in rows] == COLUMNS["lang"]


def test_openai_batch_output_names_rows_by_the_id_column(job, tmp_path):
    export(job.out, "openai-batch", tmp_path / "batch.jsonl")
    rows = lines(tmp_path / "batch.jsonl")
    assert [row["custom_id"] for row in rows] == ["a", "b", "c", "d"]
    assert len({row["id"] for row in rows}) == 4
    assert rows[1]["response"] is None
    assert rows[1]["error"]["code"] == "empty_prompt"
    answered = rows[2]["response"]
    assert (answered["status_code"], rows[2]["error"]) == (200, None)
    body = answered["body"]
    assert (body["object"], body["model"]) == ("chat.completion", "echo")
    assert body["choices"][0]["message"] == {"role": "assistant", "content": echo_text("three", 20)}
    assert body["usage"]["prompt_tokens"] == 6
    assert body["usage"]["total_tokens"] == 6 + body["usage"]["completion_tokens"]


def test_a_folder_of_datasets_has_the_rows_in_order(job, tmp_path):
    export(job.out, "datasets", tmp_path / "saved")
    loaded = datasets.load_from_disk(str(tmp_path / "saved"))
    assert loaded["row_idx"][:] == [0, 1, 2, 3]
    assert loaded["lang"][:] == COLUMNS["lang"]
    assert loaded["text"][2] == echo_text("three", 20)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job", "saved"]


def test_rows_are_named_by_their_number_without_an_id_column(tmp_path):
    job = day(tmp_path / "job", ["one", "two"])
    job.submit(output_prefix="out_")
    export(job.out, "openai-batch", tmp_path / "batch.jsonl")
    assert [row["custom_id"] for row in lines(tmp_path / "batch.jsonl")] == ["0", "1"]


@pytest.mark.parametrize("form", ["jsonl", "openai-batch", "datasets"])
def test_a_result_without_rows_is_exported(tmp_path, form):
    job = day(tmp_path / "job", pa.array([], pa.string()))
    job.submit()
    assert export(job.out, form, tmp_path / "target").num_rows == 0
    if form == "datasets":
        assert (
            datasets.load_from_disk(str(tmp_path / "target")).column_names
            == pq.read_schema(job.out / "part-00000.parquet").names
        )
    else:
        assert lines(tmp_path / "target") == []


def test_what_cannot_be_exported_is_said_and_nothing_is_left(tmp_path):
    job = day(tmp_path / "job", ["one", "two"], name=["a", "b"])
    with pytest.raises(InputMissing, match="no job at"):
        export(job.out, "jsonl", tmp_path / "rows.jsonl")
    job.submit(id_col="name", keep_cols="prompt")
    with pytest.raises(DataError, match="no column 'name', which is the --id-col; --keep-cols left it out"):
        export(job.out, "openai-batch", tmp_path / "rows.jsonl")
    with pytest.raises(OutputRefused, match="exists; remove it"):
        export(job.out, "jsonl", job.source)
    with pytest.raises(OutputRefused, match="is no folder; make it first"):
        export(job.out, "jsonl", tmp_path / "none" / "rows.jsonl")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job"]


def test_the_command_prints_the_path(tmp_path):
    job = day(tmp_path / "job", ["one", "two"])
    job.submit()
    done = job.call("export", str(job.out), "--to", "jsonl", "-o", str(tmp_path / "rows.jsonl"), "--json")
    assert json.loads(done.stdout) == {"path": str(tmp_path / "rows.jsonl"), "num_rows": 2}
    assert job.call("export", str(job.out), "--to", "xml", "-o", "x").returncode == 2
