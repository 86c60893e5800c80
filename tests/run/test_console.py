"""Small things a person meets first."""

import subprocess
import sys

import pyarrow.parquet as pq
import pytest

import batchrun as br
from tests.run.conftest import environment


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "batchrun", *arguments]
    return subprocess.run(line, env=environment(), capture_output=True, text=True, check=False)


def test_no_arguments_show_the_help():
    shown = command()
    assert shown.returncode == 2
    assert len(shown.stderr.splitlines()) > 10
    assert "submit" in shown.stderr


def test_a_column_to_keep_that_is_not_there_is_named(echo_job):
    job = echo_job(3)
    refused = job.call("submit", "--keep-cols", "id,prompd")
    assert refused.returncode == 65
    assert "--keep-cols: the input has no column 'prompd'; did you mean 'prompt'?" in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_only_the_columns_to_keep_are_kept(echo_job):
    job = echo_job(3)
    job.submit(keep_cols=("id",))
    assert pq.read_schema(job.out / "part-00000.parquet").names[:2] == ["id", "row_idx"]


def test_an_empty_stop_string_is_refused(echo_job):
    with pytest.raises(br.BatchrunError, match="--stop"):
        echo_job(3).submit(stop="")


def test_verify_says_what_to_do_about_files_that_are_gone(echo_job):
    job = echo_job(3)
    job.submit()
    (job.out / "part-00000.parquet").unlink()
    said = job.call("verify", str(job.out))
    assert said.returncode == 65
    assert "move it away and run the same command again" in said.stderr + said.stdout
    job.out.rmdir()
    assert job.call("submit").returncode == 0
    assert len(job.rows()) == 3


def test_status_of_a_complete_job_does_not_speak_of_cancelling(echo_job):
    job = echo_job(3)
    job.submit()
    assert "cancel" not in job.call("status", str(job.out), "--json").stdout
