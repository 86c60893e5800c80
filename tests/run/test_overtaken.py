"""A process that was paused for longer than its lease and wakes up beside the one that took its place."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from batchrun.store.layout import Layout
from tests.run.conftest import EchoJob, environment
from tests.run.test_kill import REST, SLOW, committed

# The command, but a holder counts as gone after a second of silence.
IMPATIENT = """
from batchrun.store import layout, lease
layout.LEASE_S = lease.LEASE_S = 1.0
from batchrun.cli import main
main()
"""


def start(job: EchoJob, *options: str) -> subprocess.Popen[str]:
    arguments = job.command("submit", *SLOW, *options)
    return subprocess.Popen(
        [sys.executable, "-c", IMPATIENT, *arguments[arguments.index("batchrun") + 1 :]],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
    )  # fmt: skip


def wait_until(condition, *processes: subprocess.Popen[str]) -> None:
    while not condition():
        assert all(process.poll() is None for process in processes), processes[0].communicate()
        time.sleep(0.02)


@pytest.fixture
def paused(echo_job, tmp_path):
    """A job and its process, which has committed something and was stopped in the middle of its work."""
    job = echo_job(2500, tmp_path / "job")
    process = start(job)
    wait_until(lambda: committed(job), process)
    process.send_signal(signal.SIGSTOP)
    yield job, process
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGCONT)
    process.kill()
    process.communicate()


@pytest.mark.parametrize("is_woken_early", [True, False], ids=["beside the other", "after it"])
def test_of_a_paused_process_and_its_successor_one_wins_and_the_result_is_that_of_an_undisturbed_run(
    echo_job, tmp_path, paused, is_woken_early
):
    job, zombie = paused
    undisturbed = echo_job(2500, tmp_path / "undisturbed")
    assert undisturbed.call("submit", *REST).returncode == 0
    num_before = len(committed(job))
    # Its lock is old, so that no --wait-lock is needed to see that it is gone.
    time.sleep(1.5)
    winner = start(job)
    if is_woken_early:
        wait_until(lambda: len(committed(job)) > num_before, winner)
        zombie.send_signal(signal.SIGCONT)
        said = zombie.communicate()[1]
    assert winner.wait() == 0, winner.communicate()
    winner.communicate()
    if not is_woken_early:
        zombie.send_signal(signal.SIGCONT)
        said = zombie.communicate()[1]
    assert zombie.returncode == 75
    last = said.splitlines()[-1]
    assert last.startswith("error: ")
    assert "was taken over" in last or "was written by another worker" in last
    rows = committed(job)
    assert len(rows) == len(set(rows))
    assert job.result() == undisturbed.result()
    assert not Layout(job.out).lock.exists()


def test_a_running_process_is_not_overtaken_however_old_its_lock_seems(echo_job):
    """Clocks of two machines differ, and jump: only a lock that nobody touches is free."""
    job = echo_job(3000)
    at, first = Layout(job.out), start(job)
    wait_until(lambda: committed(job), first)
    long_ago = time.time() - 3600
    os.utime(at.lock, (long_ago, long_ago))
    second = start(job)
    said = second.communicate()[1]
    assert second.returncode == 75
    assert f"is held by process {first.pid}" in said
    first.terminate()
    first.communicate()
    assert first.returncode == 75
