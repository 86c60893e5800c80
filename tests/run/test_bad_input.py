"""Bad rows are data, a bad job is refused in one line: through the real command."""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.run.conftest import EchoJob, typed

TEMPLATE = "{{ 100 // number }} for {{ body.upper() }}"


def invalid_utf8(texts: list[str | bytes | None]) -> pa.Array:
    """A string column with bytes that are no text in it, as broken writers make them."""
    return pa.array([text.encode() if isinstance(text, str) else text for text in texts], pa.binary()).view(pa.string())


@pytest.fixture
def bad_rows(tmp_path: Path) -> EchoJob:
    table = pa.table(
        {
            "body": invalid_utf8(["fine", "", None, "x" * 5000, b"caf\xe9", "fine too", "zero"]),
            "number": [7, 7, 7, 7, 7, 7, 0],
            "params": [None, None, None, None, None, '{"max_tokens": "many"}', None],
        }
    )
    pq.write_table(table, tmp_path / "input.parquet")
    return EchoJob(tmp_path, [])


def answers(job: EchoJob) -> list[dict[str, object]]:
    """The result's own columns: `body` cannot be shown as text."""
    return pq.read_table(job.out).drop_columns("body").to_pylist()


def errors(job: EchoJob) -> list[str | None]:
    return [row["error"] and row["error"]["type"] for row in answers(job)]


def test_every_bad_row_is_there_with_its_reason(bad_rows):
    done = bad_rows.call(
        "submit", "--prompt-col", "body", "--params-col", "params", "--max-model-len", "4000", "--json"
    )
    assert done.returncode == 0, done.stderr
    assert errors(bad_rows) == [
        None, "empty_prompt", "empty_prompt", "overlong_prompt", "invalid_utf8", "invalid_params", None
    ]  # fmt: skip
    failed = [row for row in answers(bad_rows) if row["error"]]
    assert all(row["text"] is None and row["finish_reason"] == "error" for row in failed)
    assert [row["row_idx"] for row in answers(bad_rows)] == list(range(7))
    assert json.loads(done.stdout)["errors"] == {
        "empty_prompt": 2, "overlong_prompt": 1, "invalid_utf8": 1, "invalid_params": 1
    }  # fmt: skip
    messages = {row["error"]["type"]: row["error"]["message"] for row in reversed(failed)}
    assert json.loads(done.stdout)["error_examples"] == messages
    assert f"empty_prompt: {messages['empty_prompt']}" in done.stderr


def test_a_template_fails_on_single_rows_only(bad_rows):
    done = bad_rows.call("submit", "--template", TEMPLATE)
    assert done.returncode == 0, done.stderr
    assert [kind for kind in errors(bad_rows) if kind] == ["template_error", "invalid_utf8", "template_error"]
    by_zero = answers(bad_rows)[6]["error"]["message"]
    assert "row 6" in by_zero
    assert "division" in by_zero


def test_a_budget_of_no_errors_exits_65_and_the_result_is_there_all_the_same(bad_rows):
    done = bad_rows.call("submit", "--prompt-col", "body", "--max-error-rate", "0")
    assert done.returncode == 65
    assert len(answers(bad_rows)) == 7


def snapshot(folder: Path) -> dict[str, bytes | None]:
    paths = sorted(folder.rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in paths}


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["submit", "in.parquet", "--prompt-col", "promt", "-o", "out"], 65, "did you mean 'prompt'?"),
        (["submit", "in.parquet", "--prompt-col", "id", "-o", "out"], 65, "'id'"),
        (["submit", "absent.parquet", "-o", "out"], 66, "absent.parquet"),
        (["submit", "text.parquet", "-o", "out"], 65, "is not a Parquet file"),
        (["submit", "in.parquet", "-o", "text.parquet/out"], 73, "choose another -o"),
        (["submit", "in.parquet", "-o", "theirs"], 73, "is not a result of batchrun"),
        (["submit", "in.parquet", "-o", "done", "--max-tokens", "9"], 78, "max_tokens"),
        (["submit", "in.parquet", "-m", "no/such/folder", "-o", "out"], 69, "no/such/folder"),
        (["submit", "in.parquet", "-t", "{{ 1 + }}", "-o", "out"], 65, "template"),
        (["submit", "in.parquet", "--max-tokns", "9", "-o", "out"], 2, "--max-tokens"),
        (["submit", "in.parquet", "--temperature", "hot", "-o", "out"], 2, "temperature"),
        (["resume", "never"], 66, "no job"),
    ],
)
def test_a_bad_job_is_one_line_with_a_remedy_and_changes_nothing(echo_job, monkeypatch, arguments, code, said):
    here = echo_job(20).folder
    monkeypatch.chdir(here)
    (here / "input.parquet").rename(here / "in.parquet")
    (here / "text.parquet").write_text("not at all")
    (here / "theirs").mkdir()
    (here / "theirs" / "photo.jpg").write_text("precious")
    typed("submit", "in.parquet", "-m", "echo", "-o", "done").check_returncode()
    before = snapshot(here)
    model = [] if "-m" in arguments or arguments[0] == "resume" else ["-m", "echo"]
    refused = typed(*arguments, *model)
    assert (refused.returncode, refused.stdout) == (code, ""), refused.stderr
    assert refused.stderr.count("\n") == 1, refused.stderr
    assert refused.stderr.startswith("error: ")
    assert said in refused.stderr
    assert snapshot(here) == before


def test_a_job_that_cannot_be_planned_leaves_the_earlier_plan(echo_job):
    """The plan of before was removed by a mistyped column."""
    job = echo_job(7)
    assert job.call("plan", str(job.source), "-m", "echo", "-o", str(job.out)).returncode == 0
    kept = contents(job)
    mistyped = job.call("plan", str(job.source), "-m", "echo", "-o", str(job.out), "--prompt-col", "promt")
    assert mistyped.returncode == 65
    assert contents(job) == kept
    assert job.call("plan", str(job.source), "-m", "echo", "-o", str(job.out), "--prompt-col", "id").returncode == 65
    other = job.call("plan", str(job.source), "-m", "echo", "-o", str(job.out), "-t", "Say {{ prompt }}", "--json")
    assert json.loads(other.stdout)["sample"].startswith("Say ")
    assert contents(job) != kept
    assert job.call("resume", str(job.out)).returncode == 0


@pytest.mark.parametrize("is_complete", [True, False])
def test_overwriting_with_a_job_that_cannot_be_planned_leaves_the_earlier_job(echo_job, is_complete):
    job = echo_job(7)
    job.submit()
    if not is_complete:
        shutil.rmtree(job.out)
    kept = contents(job)
    assert job.call("submit", "--prompt-col", "promt", "--overwrite").returncode == 65
    assert contents(job) == kept
    again = job.submit()
    assert (again.already_complete, again.steps) == (is_complete, 0)
    assert job.submit(overwrite=True, max_tokens=5).rows == 7
    assert {row["completion_tokens"] <= 5 for row in job.rows()} == {True}


def contents(job: EchoJob) -> dict[str, bytes]:
    """What the job has on the disk, but for the lock."""
    files = (path for path in job.folder.rglob("*") if path.is_file() and path.name != "lock")
    return {str(path.relative_to(job.folder)): path.read_bytes() for path in files}
