"""A submission in a process of its own, without any scheduler."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from batchrun_jobs.submission import Submission, submit_command
from tests.run.conftest import EchoJob, environment

SLOW = {"model": "echo", "max_num_seqs": 1, "max_tokens": 200, "min_tokens": 100}
NEVER_LEAVES = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('here', flush=True); time.sleep(600)"
)


class Log:
    """What a submission says; `heard` waits for a line with a word."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._said = threading.Condition()

    def __call__(self, line: str) -> None:
        with self._said:
            self.lines.append(line)
            self._said.notify_all()

    def heard(self, word: str) -> bool:
        with self._said:
            return self._said.wait_for(lambda: any(word in line for line in self.lines), timeout=120)


def test_options_become_flags() -> None:
    command = submit_command(
        "python", ["a", "b"], "out", config="job.toml", max_tokens=3, stop=["-", "x y"], quiet=True, limit=None,
        overwrite=False, json_schema={"type": "object"},
    )  # fmt: skip
    assert command[:7] == ["python", "-m", "batchrun", "submit", "a", "b", "--output=out"]
    assert command[7:] == [
        "--json", "--config=job.toml", "--max-tokens=3", "--stop=-", "--stop=x y", "--quiet",
        '--json-schema={"type": "object"}',
    ]  # fmt: skip


def test_the_summary_is_what_it_printed_last(echo_job: Callable[[int], EchoJob]) -> None:
    job, log = echo_job(63), Log()
    command = submit_command(sys.executable, [str(job.source)], str(job.out), model="echo")
    submission = Submission(command, log, environment())
    assert submission.wait() == 0
    summary = submission.summary()
    assert (summary["rows"], summary["failed"], summary["output"]) == (63, 0, str(job.out))
    assert log.heard("INFO completed rows=63/63")


def test_a_refusal_is_kept(tmp_path: Path) -> None:
    submission = Submission(submit_command(sys.executable, [str(tmp_path / "none")], "out"), Log(), environment())
    assert submission.wait() == 66
    assert submission.error.startswith("error: ")
    assert "none" in submission.error


def test_stopping_drains_and_the_same_command_goes_on(echo_job: Callable[[int], EchoJob]) -> None:
    job, log = echo_job(400), Log()
    command = submit_command(sys.executable, [str(job.source)], str(job.out), **SLOW)
    submission = Submission(command, log, environment())
    assert log.heard("stage=run")
    submission.stop(drain_timeout=45)
    assert submission.exit_code == 75
    assert "are committed" in submission.error
    finished = Submission(command, Log(), environment())
    assert finished.wait() == 0
    assert pq.read_table(job.out).column("row_idx").to_pylist() == [*range(400)]


def test_a_handler_that_interrupts_the_wait_may_stop_it(echo_job: Callable[[int], EchoJob]) -> None:
    """As a scheduler's handler of SIGTERM does: it runs in the thread that waits."""
    job, log = echo_job(400), Log()
    submission = Submission(submit_command(sys.executable, [str(job.source)], str(job.out), **SLOW), log, environment())
    before = signal.signal(signal.SIGUSR1, lambda number, frame: submission.stop(drain_timeout=45))
    try:
        assert log.heard("stage=run")
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        assert submission.wait() == 75
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_one_that_does_not_leave_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchrun_jobs.submission._LEAVING_S", 0.2)
    log = Log()
    submission = Submission([sys.executable, "-c", NEVER_LEAVES], log)
    assert log.heard("here")
    submission.stop(drain_timeout=0.2)
    assert submission.exit_code == -signal.SIGKILL
    assert log.heard("does not leave; killing it")


def test_a_signal_to_the_group_does_not_reach_it() -> None:
    log = Log()
    submission = Submission([sys.executable, "-c", NEVER_LEAVES], log)
    assert log.heard("here")
    pid = submission._process.pid
    assert os.getpgid(pid) == pid != os.getpgid(0)
    os.killpg(pid, signal.SIGKILL)
    assert submission.wait() == -signal.SIGKILL


def test_importing_it_needs_the_standard_library_only() -> None:
    code = (
        "import sys, batchrun_jobs.submission as it; print([n for n in sys.modules if n.split('.')[0] == 'batchrun'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment())
    assert done.stdout == "[]\n"
