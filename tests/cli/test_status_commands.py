"""status, verify and doctor: the text, the JSON and the exit code."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from batchrun import cli_status
from batchrun.cli_status import doctor_text, status_text, verify_text
from batchrun.doctor import Device, DoctorReport, Folder, examine
from batchrun.report.compared import Compared
from batchrun.store.status import Holder, RequestCounts, Status, StatusWord
from batchrun.store.verify import VerifyReport
from tests.cli.fake_library import Run

PROGRESS = {
    "status": "in_progress", "output_tokens": 1000, "elapsed_s": 4.0, "hit_rate": 0.77, "kv_usage": 0.5,
    "num_running": 7, "preemptions": 1,
}  # fmt: skip
RUNNING = Status(
    output="/data/out",
    status="in_progress",
    request_counts=RequestCounts(total=2000, completed=800, failed=3),
    errors={"template_error": 1, "overlong_prompt": 2},
    holder=Holder(4121, "gpu7"),
    progress=PROGRESS,
    progress_at=1000.0,
)
DONE = Status("/data/out", "completed", RequestCounts(63, 63, 0), {}, None, {}, None)


def test_status_of_a_running_job() -> None:
    assert status_text(RUNNING, at_s=1003.0).splitlines() == [
        "status   in progress",
        "rows     803 of 2,000 (40.2%) · 3 failed (overlong_prompt 2, template_error 1)",
        "held by  process 4121 on gpu7",
        "speed    250 tok/s · prefix hit 77% · KV 50% · 7 running · preempted 1 (3s ago)",
        "output   /data/out",
    ]


def test_status_shows_what_rows_waited_for() -> None:
    waited = {"time_to_first_token_s": {"count": 2, "p50": 0.5, "p90": 62.0, "p99": 3.25, "buckets": {}}}
    lines = status_text(replace(RUNNING, progress=PROGRESS | {"latencies": waited}), at_s=1003.0).splitlines()
    assert lines[-2:] == ["first token  p50 500ms · p90 1m02s · p99 3.25s", "output       /data/out"]


def test_status_says_what_was_foretold_and_what_came() -> None:
    compared = [
        Compared("steps", "steps", 1200, 1300),
        Compared("peak KV", "bytes", 1 << 20, 3 << 19),
        Compared("time in the engine", "seconds", None, 61.0),
    ]
    assert status_text(DONE, at_s=0.0, compared=compared).splitlines()[2:4] == [
        "foretold  steps 1,200 · came to 1,300",
        "          peak KV 1.0MiB · came to 1.5MiB",
    ]


def test_status_of_a_job_that_says_nothing() -> None:
    assert status_text(DONE, at_s=0.0) == "status  completed\nrows    63 of 63 (100.0%)\noutput  /data/out"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("planned", "planned · nothing has run yet; batchrun resume runs it"),
        ("interrupted", "interrupted · its process is gone; what was committed is kept, batchrun resume goes on"),
        ("cancelled", "cancelled · all that was done is saved; batchrun resume goes on"),
        ("failed", "failed · ended with an error; what was committed is kept, batchrun resume goes on"),
        ("output_missing", "output missing · it was complete, but its result was moved, deleted or has lost files; "),
    ],
)
def test_status_of_a_job_that_nobody_runs_says_what_to_do(word: StatusWord, said: str) -> None:
    assert said in status_text(replace(DONE, status=word), at_s=0.0).splitlines()[0]


@pytest.mark.parametrize("code", [2, 65, 69])
def test_a_job_that_was_refused_is_not_to_be_resumed(code: int) -> None:
    """`resume` has the same options, and was advised."""
    error = {"message": "the model cannot be divided; leave out --tensor-parallel", "exit_code": code}
    failed = replace(DONE, status="failed", progress={"error": error})
    assert status_text(failed, at_s=0.0).splitlines()[:3] == [
        "status  failed · ended with an error; what was committed is kept",
        "error   the model cannot be divided; leave out --tensor-parallel",
        "        batchrun resume would fail so again; when that is mended, or with other options, submit goes on",
    ]


def test_a_job_whose_engine_or_disk_failed_is_to_be_resumed() -> None:
    failed = replace(DONE, status="failed", progress={"error": {"message": "no space left", "exit_code": 74}})
    assert status_text(failed, at_s=0.0).splitlines()[:2] == [
        "status  failed · ended with an error; what was committed is kept, batchrun resume goes on from there",
        "error   no space left",
    ]


def test_status_json_is_one_object(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_status, "look", lambda out: RUNNING)
    assert json.loads(run("status", "out", "--json").stdout) == RUNNING.to_dict() | {"compared": []}
    assert json.loads(run("status", "out", BATCHRUN_JSON="1").stdout) == RUNNING.to_dict() | {"compared": []}


def test_watch_looks_until_nobody_holds_the_job(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([RUNNING, RUNNING, DONE])
    naps: list[float] = []
    monkeypatch.setattr(cli_status, "look", lambda out: next(looks))
    monkeypatch.setattr(time, "sleep", naps.append)
    result = run("status", "out", "--watch", "--json")
    assert result.exit_code == 0
    assert naps == [2.0, 2.0]
    assert result.stderr == (
        "in progress  803 of 2,000 (40.2%) · 3 failed (overlong_prompt 2, template_error 1) · "
        "250 tok/s · prefix hit 77% · KV 50% · 7 running · preempted 1\n"
    )
    assert json.loads(result.stdout) == DONE.to_dict() | {"compared": []}


@pytest.mark.parametrize("name", ["status", "verify"])
def test_no_job_is_66(run: Run, tmp_path: Path, name: str) -> None:
    result = run(name, "out")
    assert (result.exit_code, result.stdout) == (66, "")
    assert result.stderr == "error: no job at out.batchrun; batchrun submit creates one\n"


def test_verify_of_an_unfinished_job_is_65_with_the_report_on_stdout(run: Run, tmp_path: Path) -> None:
    (tmp_path / "out.batchrun").mkdir()
    stored = {"job": {"output_prefix": "br_"}, "fingerprint": {}}
    (tmp_path / "out.batchrun" / "job.json").write_text(json.dumps(stored))
    result = run("verify", "out", "--json")
    assert result.exit_code == 65
    report = json.loads(result.stdout)
    assert (report["is_ok"], report["num_rows"], len(report["problems"])) == (False, 0, 1)
    assert result.stderr == "error: out is not what the job should have written: 1 problem\n"


def test_verify_says_each_problem_once(run: Run, tmp_path: Path) -> None:
    """The only problem was on stdout and again in the error, as "1 problems"."""
    (tmp_path / "out.batchrun").mkdir()
    (tmp_path / "out.batchrun" / "job.json").write_text('{"job": {"output_prefix": ""}, "fingerprint": {}}')
    result = run("verify", "out")
    assert "verdict  1 problem\n" in result.stdout
    assert (result.output.count("out is not complete: "), result.exit_code) == (1, 65)


@pytest.mark.parametrize("name", ["out", "out.batchrun", "out.batchrun/"])
@pytest.mark.parametrize("command", ["status", "verify", "report"])
def test_a_job_may_be_named_by_its_folder(run: Run, tmp_path: Path, name: str, command: str) -> None:
    """Tab completion led to "no job at out.batchrun.batchrun"."""
    assert run(command, name).stderr == "error: no job at out.batchrun; batchrun submit creates one\n"
    (tmp_path / "out.batchrun").mkdir()
    (tmp_path / "out.batchrun" / "job.json").write_text('{"job": {"output_prefix": ""}, "fingerprint": {}}')
    assert Path(json.loads(run(command, name, "--json").stdout)["output"]).name == "out"


def test_an_output_whose_own_name_ends_so_is_found(run: Run, tmp_path: Path) -> None:
    (tmp_path / "out.batchrun.batchrun").mkdir()
    (tmp_path / "out.batchrun.batchrun" / "job.json").write_text('{"job": {"output_prefix": ""}, "fingerprint": {}}')
    assert json.loads(run("status", "out.batchrun", "--json").stdout)["output"] == "out.batchrun"


def test_verify_text_lists_every_problem() -> None:
    report = VerifyReport("/data/out", 62, 63, 1, 2, ("part-00000.parquet is missing", "row_idx 7 \x1b[1m"))
    assert verify_text(report).splitlines() == [
        "rows     62 of 63 planned · 1 failed",
        "files    2",
        "verdict  2 problems",
        "         part-00000.parquet is missing",
        "         row_idx 7 \\x1b[1m",
    ]
    assert verify_text(VerifyReport("/data/out", 63, 63, 0, 1, ())).splitlines()[-1] == "verdict  complete"


REPORT = DoctorReport(
    python="3.11.7",
    versions={"torch": "2.13.0", "triton": None},
    devices=(
        Device("cpu", "x86_64, 2 cores, AVX2", 8 * 1024**3, 6 * 1024**3, "torch", ("sinks", "window")),
        Device("cuda:0", "H200", 1024**3, 512, None, ()),
    ),
    folders=(Folder("current folder", Path("/data"), True, 1536), Folder("temporary files", Path("/tmp"), False, 0)),
    problems=("triton is not installed: pip install triton",),
)


def test_doctor_text() -> None:
    assert doctor_text(REPORT).splitlines() == [
        "python     3.11.7",
        "packages   torch 2.13.0 · triton missing",
        "cpu        x86_64, 2 cores, AVX2 · 6.0GiB of 8.0GiB free · attention torch (sinks, window)",
        "cuda:0     H200 · 512B of 1.0GiB free · no attention",
        "writable   /data (current folder) · 1.5KiB free",
        "read-only  /tmp (temporary files) · 0B free",
        "problem    triton is not installed: pip install triton",
    ]


def test_doctor_reports_this_machine(run: Run) -> None:
    report = examine()
    assert report.devices[0].name == "cpu"
    assert report.devices[0].attention is not None
    assert report.devices[0].memory_bytes > report.devices[0].free_bytes > 0
    result = run("doctor", "--json")
    shown = json.loads(result.stdout)
    assert result.exit_code == (69 if shown["problems"] else 0)
    assert shown["versions"] == report.versions


def test_missing_c_kernels_are_a_problem_that_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job warns too, when it has begun; this is where one finds out before."""
    monkeypatch.setattr("batchrun_kernels.native.FOLDER", tmp_path)
    assert any("slower" in problem and "install a C compiler" in problem for problem in examine().problems)


def test_a_folder_that_refuses_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "cache"))
    (tmp_path / "file").write_text("in the way")
    report = examine()
    assert [folder.is_writable for folder in report.folders] == [True, True, False]
    assert any("converted models" in problem and "cannot be written" in problem for problem in report.problems)
