"""The script for a GPU runs without one: it says so, says what it would do, and does what a CPU can."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ["device", "suite", "graphs", "engine", "attention", "layers", "job", "cuts"]


@pytest.mark.timeout(1200)
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_the_dry_run_does_every_part_at_a_tiny_size(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "tests/gpu/run.py", "--json", str(tmp_path / "found.json")]
    run = subprocess.run(
        command, cwd=ROOT, env={**env, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert run.stdout.startswith("no GPU: ")
    results = json.loads((tmp_path / "found.json").read_text())["results"]
    assert list(dict.fromkeys(result["part"] for result in results)) == PARTS
    assert all(result["is_right"] for result in results)
    kernels = {result["name"] for result in results if result["part"] in ("attention", "layers")}
    assert kernels == {
        *("attend decode", "attend decode in runs", "attend chunk", "attend chunk in runs"),
        *("attend cascade", "attend flat"),
        *("write_kv", "rope", "copy_blocks", "add_rms_norm", "glu", "linear_lse", "sample"),
    }
    assert "attend decode, 256 rows, context 300-8000: 4,527.2 MB" in run.stdout


def test_an_unknown_part_is_refused_with_those_there_are() -> None:
    command = [sys.executable, "tests/gpu/run.py", "--part", "kernels"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert run.stderr.strip() == f"no part kernels; there are {', '.join(PARTS)}"
