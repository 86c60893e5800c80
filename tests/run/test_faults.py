"""Whatever the disk refuses, and wherever the process dies or is paused: the same command again ends the job."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.run.conftest import environment

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(1200)
@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("cc"), reason="needs Linux and a C compiler")
def test_every_call_on_the_disk_may_fail_be_the_last_or_wait_for_another_process():
    """One fault for each call, by turns; the command without --one-fault has all of them, for other commands too."""
    command = [sys.executable, "-m", "tests.endurance.faults", "--rows", "1", "--scenario", "fresh", "--one-fault"]
    walked = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment())
    assert walked.returncode == 0, walked.stdout + walked.stderr
    calls = {line.split()[0] for line in walked.stdout.splitlines() if line}
    assert {"write", "fsync", "link", "rename", "mmap", "create", "remove"} <= calls
