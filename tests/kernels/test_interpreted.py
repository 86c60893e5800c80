"""The Triton kernels, run by Triton's interpreter: in a process of its own, as Triton must not be imported before."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(1200)
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_the_triton_kernels_are_right_under_the_interpreter() -> None:
    folder = Path(__file__).parent / "interpreted"
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", str(folder)]
    run = subprocess.run(command, env=env, cwd=folder.parents[2], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    # Neither skipped nor deselected: it ran.
    assert re.fullmatch(r"[0-9]+ passed in .*", run.stdout.splitlines()[-1]), run.stdout[-500:]
