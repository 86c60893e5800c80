"""What a job does about rows and engines that fail: which rows it pays with, and that it ends at last."""

import os
import subprocess
import sys
import threading
from typing import Any

import pytest

from batchrun.engine.echo import EchoRunner
from batchrun.engine.step import ScheduledBatch
from batchrun.errors import DataError, EngineFailed
from batchrun.store.layout import Layout
from batchrun.watchdog import Watchdog
from tests.run.conftest import EchoJob, echo_text, environment

_FULL_DISK = """
from batchrun.store.store import Store
def refuse(self, rows):
    raise OSError(28, "No space left on device")
Store.suspect = refuse
"""
_STUCK = """
import sys, time
from batchrun.engine.echo import EchoRunner
launch = EchoRunner.launch
def stuck(self, batch):
    while any(item.sequence.request.row_idx == 5 and item.output_len > 0 for item in batch.items):
        time.sleep(0.01)
    return launch(self, batch)
EchoRunner.launch = stuck
from batchrun.cli import main
main()
"""


def failing(monkeypatch: pytest.MonkeyPatch, rows: set[int]) -> None:
    """From now on no step with one of these rows can be computed."""
    launch = EchoRunner.launch

    def launched(self: EchoRunner, batch: ScheduledBatch) -> Any:
        if any(item.sequence.request.row_idx in rows for item in batch.items):
            raise RuntimeError("a kernel fell over")
        return launch(self, batch)

    monkeypatch.setattr(EchoRunner, "launch", launched)


def check(job: EchoJob, failed: set[int], message: str) -> None:
    for row, prompt in zip(job.rows(), job.prompts, strict=True):
        if row["row_idx"] in failed:
            assert row["error"] == {"type": "engine_error", "message": message}
        else:
            assert row["text"] == echo_text(prompt, 40)


def test_rows_that_the_engine_fails_on_are_rows_with_an_error(echo_job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer of row 3 is that of rows 7, 14 and 28 too."""
    job = echo_job(40)
    failing(monkeypatch, {3, 30})
    outcome = job.submit(max_tokens=40)
    assert outcome.errors == {"engine_error": 5}
    check(job, {3, 7, 14, 28, 30}, "the engine fails on this row: RuntimeError: a kernel fell over")


def test_rows_that_fail_all_at_once_are_tried_alone_by_the_next_process(
    echo_job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = echo_job(2)
    failing(monkeypatch, {0, 1})
    with pytest.raises(EngineFailed, match="no row can be computed any more"):
        job.submit()
    assert job.submit().errors == {"engine_error": 2}


def test_a_device_that_was_lost_costs_no_row(echo_job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    job = echo_job(40)
    with monkeypatch.context() as lost:
        failing(lost, set(range(40)))
        with pytest.raises(EngineFailed):
            job.submit(max_tokens=40)
    assert job.submit(max_tokens=40).errors == {}
    check(job, set(), "")


def test_abort_after_stops_at_once_and_the_job_goes_on_without_it(
    echo_job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = echo_job(40)
    failing(monkeypatch, {3, 17, 30})
    with pytest.raises(DataError, match=r"stopped after 3 failed rows \(--abort-after 3\)"):
        job.submit(max_tokens=40, abort_after=3, max_num_seqs=4)
    assert not job.out.exists()
    with pytest.raises(DataError):
        job.submit(max_tokens=40, abort_after=3)
    outcome = job.submit(max_tokens=40)
    assert outcome.rows == 40
    assert outcome.num_failed >= 3


def test_the_exit_code_of_an_aborted_job_is_65(echo_job: Any) -> None:
    job = echo_job(40)
    half = sorted(map(len, job.prompts))[20]
    ended = job.call("submit", "--abort-after", "1", "--max-model-len", str(half), "-q")
    assert (ended.returncode, ended.stdout) == (65, "")
    assert "--abort-after 1" in ended.stderr


def test_a_stuck_step_is_dumped_and_given_up_and_its_row_is_not_tried_for_ever(echo_job: Any) -> None:
    """First beside others, then alone, then no more."""
    job = echo_job(40)
    arguments = job.command("submit", "--max-tokens", "40", "--step-timeout", "1s", "-q")[3:]
    codes = []
    for _ in range(3):
        ended = subprocess.run(
            [sys.executable, "-c", _STUCK, *arguments], capture_output=True, text=True, env=environment(), check=False
        )
        codes.append(ended.returncode)
        if ended.returncode:
            assert "a step did not end within 1 s (--step-timeout)" in ended.stderr
            dump = Layout(job.out).stuck.read_text()
            assert "running" in dump.splitlines()[0]
            assert "in stuck" in dump
            assert "in _give_up" in dump
    assert codes == [70, 70, 0]
    check(job, {5}, "2 processes of the job ended while this row ran")
    assert job.call("retry", str(job.out), "-q").returncode == 0
    check(job, set(), "")


def test_a_stuck_process_ends_also_where_nothing_can_be_written(echo_job: Any) -> None:
    arguments = echo_job(10).command("submit", "--max-tokens", "40", "--step-timeout", "1s", "-q")[3:]
    ended = subprocess.run([sys.executable, "-c", _FULL_DISK + _STUCK, *arguments], env=environment(), check=False)
    assert ended.returncode == 70


def test_a_watchdog_barks_at_a_step_that_does_not_end_and_at_no_other() -> None:
    barked = threading.Event()
    watchdog = Watchdog(0.5, barked.set)
    with watchdog.watching():
        for _ in range(12):
            with watchdog.step():
                assert not barked.wait(0.05)
        assert not barked.wait(0.6)
        with watchdog.step():
            assert barked.wait(60)


def test_without_a_limit_there_is_no_watchdog() -> None:
    with Watchdog(0, os.abort).watching():
        assert not [thread for thread in threading.enumerate() if thread.name == "watchdog"]
