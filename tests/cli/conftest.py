"""The commands with a library behind them that only writes down what it was asked."""

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import batchrun
from batchrun.cli import batchrun as command
from batchrun.outcome import Outcome
from tests.cli.fake_library import Library, Run


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    fake = Library(Outcome(output=Path("/data/out"), rows=63))
    for name in ("lifecycle", "planning"):
        monkeypatch.setitem(sys.modules, f"batchrun.{name}", fake)
        monkeypatch.setattr(batchrun, name, fake, raising=False)
    return fake


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs the command in an empty folder, without the variables of whoever runs the tests."""
    monkeypatch.chdir(tmp_path)

    def invoke(*arguments: str, **env: str) -> Result:
        with monkeypatch.context() as clean:
            for name, value in env.items():
                clean.setenv(name, value)
            return CliRunner().invoke(command, list(arguments), prog_name="batchrun")

    return invoke
