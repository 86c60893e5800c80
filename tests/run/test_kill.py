"""Killed at random moments and started again: the result is the one of an undisturbed run, byte for byte."""

import random
import signal
import subprocess
import time
from collections.abc import Callable

import pyarrow.parquet as pq
import pytest

from batchrun.store import partial
from batchrun.store.layout import Layout
from tests.run.conftest import EchoJob, echo_text

# A job that is disturbed, and what ends it: the same job in larger steps, whose result is the same.
REST = ("--max-tokens", "60", "--progress", "none")
SLOW = (*REST, "--max-num-seqs", "4", "--checkpoint-every", "0.1s")


def committed(job: EchoJob) -> list[int]:
    """Every row index of every part, as often as it is there."""
    parts = sorted((job.folder / "out.batchrun" / "parts").glob("*.parquet"))
    return [row for part in parts for row in pq.read_table(part, columns=["row_idx"]).column(0).to_pylist()]


def kill_after(
    job: EchoJob,
    seconds: float,
    number: signal.Signals = signal.SIGKILL,
    command: tuple[str, ...] = ("submit", *SLOW),
    has_begun: Callable[[], bool] = lambda: True,
) -> int:
    """Sends the signal so long after it has begun, unless the command ends before; its exit code."""
    process = job.start(*command)
    while process.poll() is None and not has_begun():
        time.sleep(0.01)
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(number)
    process.communicate()
    return process.returncode


def kill_again_and_again(
    job: EchoJob, command: tuple[str, ...], seed: int, has_begun: Callable[[], bool], is_done: Callable[[], bool]
) -> None:
    """Starts the command and kills it at a random moment after it `has_begun`; five times, or until it `is_done`."""
    rng, codes = random.Random(seed), []
    while len(codes) < 5 and not is_done():
        codes.append(kill_after(job, rng.uniform(0.0, 1.2), command=command, has_begun=has_begun))
        rows = committed(job)
        assert len(rows) == len(set(rows)), "a row is in two parts"
    assert -signal.SIGKILL in codes, "never killed while it ran"


def stop_once_it_commits(job: EchoJob, number: signal.Signals) -> int:
    process = job.start("submit", *SLOW)
    while process.poll() is None and not committed(job):
        time.sleep(0.05)
    process.send_signal(number)
    process.communicate()
    return process.returncode


@pytest.fixture
def undisturbed(echo_job, tmp_path):
    job = echo_job(2500, tmp_path / "undisturbed")
    assert job.call("submit", *REST).returncode == 0
    return job


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_job_killed_again_and_again_ends_like_one_that_never_was(echo_job, tmp_path, undisturbed, number):
    job = echo_job(2500, tmp_path / "killed")
    rng = random.Random(11)
    num_done, codes = 0, []
    for _ in range(4):
        codes.append(kill_after(job, rng.uniform(1.0, 2.5), number))
        rows = committed(job)
        assert len(rows) == len(set(rows)), "a row is in two parts"
        assert len(rows) >= num_done, "a committed row was lost"
        num_done = len(rows)
        if not codes[-1]:
            break
    assert {-number, 75} & set(codes), "never killed while it ran"
    assert job.call("submit", *REST).returncode == 0
    assert job.result() == undisturbed.result()


def test_a_second_process_is_told_who_holds_the_job(echo_job):
    job = echo_job(3000)
    first = job.start("submit", *SLOW)
    try:
        while not (job.folder / "out.batchrun" / "plan").exists():
            assert first.poll() is None, first.communicate()
        second = job.call("submit", *SLOW)
    finally:
        first.terminate()
        first.communicate()
    assert second.returncode == 75
    assert f"process {first.pid} on host" in second.stderr
    assert second.stderr.count("\n") == 1


def test_sigterm_saves_and_exits_75_and_resume_needs_only_the_output(echo_job):
    job = echo_job(3000)
    assert stop_once_it_commits(job, signal.SIGTERM) == 75
    assert not job.out.exists()
    resumed = job.call("resume", str(job.out), "--json")
    assert resumed.returncode == 0, resumed.stderr
    assert len(job.rows()) == 3000


def test_a_kill_loses_no_token_of_before_the_last_checkpoint(echo_job):
    """Unfinished rows go on from what they had, though nobody could say goodbye."""
    job = echo_job(3000)
    at, process = Layout(job.out), job.start("submit", *SLOW)
    while process.poll() is None and not at.partial.exists():
        time.sleep(0.05)
    process.kill()
    process.communicate()
    kept = partial.load(at)
    assert kept
    assert all(kept.values())
    assert job.call("submit", *REST).returncode == 0
    assert [row["text"] for row in job.rows()] == [echo_text(prompt, 60) for prompt in job.prompts]


def test_sigint_exits_130(echo_job):
    assert stop_once_it_commits(echo_job(3000), signal.SIGINT) == 130


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
@pytest.mark.parametrize("gap_s", [0.0, 0.01, 0.1])
def test_any_number_of_signals_end_the_job_by_its_exit_code(echo_job, number, code, gap_s):
    """The third killed it, and those after it disturbed the interpreter's own end."""
    job = echo_job(3000)
    process = job.start("submit", *SLOW, "-q")
    while process.poll() is None and not committed(job):
        time.sleep(0.05)
    while process.poll() is None:
        process.send_signal(number)
        time.sleep(gap_s)
    stdout, stderr = process.communicate()
    assert (process.returncode, stdout) == (code, "")
    *before, last = stderr.splitlines()
    assert last.startswith(f"error: stopped by {number.name}: ")
    assert {line.partition(":")[0] for line in before} <= {"stopping", "stopping at once"}


def test_any_number_of_interrupts_end_a_plan_by_130(echo_job):
    job = echo_job(100_000)
    process = job.start("plan", str(job.source), "-m", "echo", "-o", str(job.out), "--progress", "none")
    while process.poll() is None and not (job.folder / "out.batchrun" / "lock").exists():
        time.sleep(0.01)
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        time.sleep(0.001)
    stdout, stderr = process.communicate()
    assert (process.returncode, stdout) == (130, "")
    *before, last = stderr.splitlines()
    assert last.startswith("error: ")
    assert last.endswith("; the same command goes on from here")
    assert {line.partition(":")[0] for line in before} <= {"stopping", "stopping at once"}
