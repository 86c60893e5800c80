"""list: every job below a folder, whatever state it is in."""

import json
import os
from pathlib import Path

import pytest

from batchrun.cli_list import list_text
from batchrun.store.listing import list_jobs
from tests.cli.fake_library import Run


def make_job(out: Path, at: float, *, num_rows: int | None = None, job: str = '{"job": {}, "fingerprint": {}}') -> None:
    folder = out.with_name(out.name + ".batchrun")
    folder.mkdir(parents=True)
    (folder / "job.json").write_text(job)
    os.utime(folder / "job.json", (at, at))
    if num_rows is not None:
        (folder / "plan").mkdir()
        (folder / "plan" / "plan.json").write_text(json.dumps({"summary": {"num_rows": num_rows}}))
        os.utime(folder / "plan", (at, at))


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    make_job(tmp_path / "a", 1000.0, num_rows=2000)
    make_job(tmp_path / "deep" / "er" / "b\x1b[1m", 4000.0)
    make_job(tmp_path / "broken", 3000.0, num_rows=1)
    (tmp_path / "broken.batchrun" / "plan" / "plan.json").write_text("{")
    (tmp_path / "a").mkdir()
    (tmp_path / "empty.batchrun").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path)
    return tmp_path


def test_all_jobs_are_found_the_latest_first(jobs: Path) -> None:
    shown = list_text(list_jobs(jobs), at_s=4600.0).splitlines()
    assert [line.split()[0] for line in shown] == ["status", "interrupted", "unreadable", "planned"]
    assert shown[1].endswith(f"10m00s ago  {jobs}/deep/er/b\\x1b[1m")
    assert "plan.json is damaged" in shown[2]
    assert shown[3].startswith("planned      0 of 2,000")
    assert shown[3].endswith(f"1h00m ago   {jobs}/a")


def test_a_folder_with_a_job_json_of_somebody_elses_is_no_job(tmp_path: Path) -> None:
    for name in ("other", "other/inner", ".batchrun"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "job.json").write_text("{}")
    make_job(tmp_path / "other" / "mine", 1000.0)
    make_job(tmp_path / "odd.batchrun", 900.0)
    found = [job.output for job in list_jobs(tmp_path)]
    assert found == [str(tmp_path / "other" / "mine"), str(tmp_path / "odd.batchrun")]


def test_list_as_json_is_one_object(run: Run, jobs: Path) -> None:
    found = json.loads(run("list", str(jobs), "--json").stdout)["jobs"]
    assert [Path(job["output"]).name for job in found] == ["b\x1b[1m", "broken", "a"]
    assert [job["job"] and job["job"]["status"] for job in found] == ["interrupted", None, "planned"]
    assert found[2]["job"]["request_counts"] == {"total": 2000, "completed": 0, "failed": 0}


def test_list_of_the_current_folder_without_jobs(run: Run) -> None:
    assert run("list").stdout == "no jobs\n"


def test_list_of_no_folder_is_66(run: Run) -> None:
    result = run("list", "nowhere")
    assert (result.exit_code, result.stdout) == (66, "")
    assert result.stderr == "error: no folder nowhere; give one that jobs write to\n"
