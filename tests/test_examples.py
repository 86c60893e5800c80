"""The examples run as they are."""

import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, str(EXAMPLES / "notebook.py")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "What do bees make?" in done.stdout
    assert pq.read_table(tmp_path / "out" / "triage").num_rows == 12
