"""A result in the forms that other tools take."""

import datetime
import json

import datasets
import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun.errors import DataError, InputMissing, OutputRefused, StorageFailed
from batchrun.retry import retry
from batchrun.stop import StopRequest
from batchrun.store.export import export
from batchrun.store.export_format import EXPORT_FORMATS
from tests.run.conftest import echo_text, ignore
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


def test_rows_of_batch_requests_keep_their_own_ids_and_the_help_says_so(tmp_path):
    job = day(tmp_path / "job", ["one", "two"], custom_id=["x", "y"])
    job.submit()
    export(job.out, "openai-batch", tmp_path / "batch.jsonl")
    assert [row["custom_id"] for row in lines(tmp_path / "batch.jsonl")] == ["x", "y"]
    shown = " ".join(job.call("export", "--help").stdout.split())
    assert "its custom_id is the --id-col of the job, or else the column custom_id, or else row_idx" in shown


@pytest.mark.parametrize("form", EXPORT_FORMATS)
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


@pytest.mark.parametrize(
    ("values", "exported"),
    [
        (["00123", "1e3", None, "true"], ["00123", "1e3", None, "true"]),
        (["a/b c", "50%+", "it's", "k=v"], ["a/b c", "50%+", "it's", "k=v"]),
        ([True, None, False, True], [True, None, False, True]),
        ([-7, 2**60, None, 0], [-7, 2**60, None, 0]),
        ([datetime.date(2026, 1, 2), None] * 2, ["2026-01-02", None] * 2),
    ],
)
def test_a_column_in_the_folders_names_keeps_its_type_and_folders_above_are_no_columns(tmp_path, values, exported):
    """Neither a new column for `ds`, nor another value for `k` and the result's own `name`."""
    folder = tmp_path / "ds=2026-01-01" / "k=other" / "name=it's"
    folder.mkdir(parents=True)
    job = day(folder / "job", ["one", "two", "three", "four"], name=["a", "b", "c", "d"], k=values, filename=["f"] * 4)
    job.submit(partition_by="k")
    export(job.out, "jsonl", tmp_path / "rows.jsonl")
    rows = lines(tmp_path / "rows.jsonl")
    assert [row["k"] for row in rows] == exported
    assert [row["name"] for row in rows] == ["a", "b", "c", "d"]
    assert "ds" not in rows[0]
    assert rows[0]["filename"] == "f"
    export(job.out, "datasets", tmp_path / "saved")
    loaded = datasets.load_from_disk(str(tmp_path / "saved"))
    assert loaded["k"][:] == values
    assert loaded.features["k"] == datasets.Features.from_arrow_schema(pa.schema([("k", pa.array(values).type)]))["k"]


def test_a_condition_sees_a_column_in_the_folders_names_as_its_type_and_no_folder_above(tmp_path):
    folder = tmp_path / "name=z"
    folder.mkdir()
    job = day(folder / "job", ["one", "two", "three"], name=["a", "b", "c"], k=["007", "7", None])
    job.submit(partition_by="k")
    for where, num_rows in {"k = '007'": 1, "k LIKE '0%' OR k IS NULL": 2, "name <> 'z'": 3}.items():
        assert retry(job.out, where, {}, ignore, StopRequest()).retried == num_rows
    plain = day(folder / "plain", ["one", "two"], name=["a", "b"])
    plain.submit()
    assert retry(plain.out, "name = 'b'", {}, ignore, StopRequest()).retried == 1


def test_what_exceeds_the_memory_lies_beside_the_target(tmp_path, monkeypatch):
    job = day(tmp_path / "job", ["one", "two"], k=["a", "b"])
    job.submit(partition_by="k")
    connect, folders = duckdb.connect, []

    def noted(*arguments, **options):
        connection = connect(*arguments, **options)
        folders.append(connection.sql("SELECT current_setting('temp_directory')").fetchall()[0][0])
        return connection

    monkeypatch.setattr(duckdb, "connect", noted)
    (tmp_path / "to").mkdir()
    export(job.out, "jsonl", tmp_path / "to" / "rows.jsonl")
    assert folders
    assert all(folder.startswith(f"{tmp_path}/to/.rows.jsonl.") for folder in folders)
    assert [path.name for path in (tmp_path / "to").iterdir()] == ["rows.jsonl"]


@pytest.mark.parametrize("form", EXPORT_FORMATS)
def test_a_damaged_file_in_a_folder_is_said_and_nothing_is_left(tmp_path, form):
    job = day(tmp_path / "job", ["one", "two"], k=["a", "b"])
    job.submit(partition_by="k")
    path = job.out / "k=b" / "part-00000.parquet"
    content = path.read_bytes()
    for damaged in (content[:-40], content[:4] + b"\xff" * (len(content) // 2) + content[4 + len(content) // 2 :]):
        path.write_bytes(damaged)
        with pytest.raises(StorageFailed, match=r"cannot read .*/out \(.*\); batchrun verify .*/out says more"):
            export(job.out, form, tmp_path / "target")
        assert [path.name for path in tmp_path.iterdir()] == ["job"]
