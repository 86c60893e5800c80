"""What is timed of a job's beginning and end is done by processes like its own."""

import socket
import time
from pathlib import Path

import pytest

from batchrun.checkpoint import Checkpoint
from batchrun.errors import BatchrunError, EngineFailed, ModelUnavailable, StorageFailed
from batchrun.job import Job
from batchrun.tune import start as subject
from batchrun.tune.start import measure_start
from tests.tune.profiles import SPEC

JOB = Job(inputs=("none",), output="none", model="echo")


def measure(cache: Path, job: Job = JOB) -> BatchrunError | None:
    """What it was refused with."""
    try:
        measure_start(job, Checkpoint(SPEC, None), cache, time.perf_counter)
    except BatchrunError as error:
        return error
    return None


def test_both_times_are_of_whole_processes_and_leave_nothing(cache: Path) -> None:
    """Neither has begun when it is started, nor is an option of other jobs any of its."""
    began = time.perf_counter()
    with pytest.MonkeyPatch.context() as patch, socket.create_server(("127.0.0.1", 0)) as collector:
        patch.setenv("BATCHRUN_MODEL", "no-such-model")
        patch.setenv("BATCHRUN_DEADLINE", "0s")
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.getsockname()[1]}")
        patch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
        start = measure_start(JOB, Checkpoint(SPEC, None), cache, time.perf_counter)
        collector.setblocking(False)
        with pytest.raises(BlockingIOError):
            collector.accept()
    whole_s = time.perf_counter() - began
    assert 0.1 < start.job_s < whole_s
    assert 0.1 < start.worker_s < whole_s
    assert start.job_s + start.worker_s <= whole_s
    assert [*cache.iterdir()] == []


def test_a_worker_that_refuses_says_why(cache: Path) -> None:
    error = measure(cache, JOB.model_copy(update={"model": "/no/such/model"}))
    assert isinstance(error, ModelUnavailable)
    assert "/no/such/model" in str(error)


def test_a_worker_that_dies_is_no_time(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchrun.executors.processes.__name__", "batchrun.no_such_module")
    error = measure(cache)
    assert isinstance(error, EngineFailed)
    assert str(error) == "a worker could not be timed: exit code 1"


def test_a_job_that_fails_is_no_time(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "_SUBMIT", ("submit", "elsewhere.jsonl", "-m", "echo", "-o", "out"))
    error = measure(cache)
    assert isinstance(error, EngineFailed)
    assert "elsewhere.jsonl" in str(error)


def test_a_cache_that_cannot_be_written_to_is_an_error_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    assert isinstance(measure(tmp_path / "cache"), StorageFailed)
