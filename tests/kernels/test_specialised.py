"""The compile gate compiles what a device would launch."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_what_is_compiled_is_what_a_device_would_launch(target: str) -> None:
    """The same types, constants and alignments: a gate that compiled another specialisation would prove nothing."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_DEFAULT_FP_FUSION": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "tests.kernels.specialised", target]
    run = subprocess.run(command, env=env, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    assert re.fullmatch(r"[0-9]{2} launches\n", run.stdout), run.stdout[:4000]
