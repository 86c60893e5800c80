"""Runs a script of `children/` in a process of its own, with the threads that all of them have."""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from batchrun_jobs.bench.processor_time import ProcessorTime
from batchrun_jobs.bench.threads import Threads

CHILDREN = Path(__file__).with_name("children")
_LAST_LINES = 5


class Rows(Protocol):
    """What children are given to do."""

    def save(self, file: Path) -> None:
        """As a job's input."""
        ...

    def given(self) -> dict[str, Any]:
        """As JSON, for those that read no Parquet."""
        ...


class ChildFailedError(Exception):
    """A child ended badly; the message has its exit code and the last lines that it wrote."""

    def __init__(self, exit_code: int, written: str) -> None:
        last = "\n".join(f"  {line}" for line in written.rstrip().splitlines()[-_LAST_LINES:])
        super().__init__(f"exit code {exit_code}\n{last}")


@dataclass(frozen=True, slots=True)
class Ended:
    """A child that went well: what its script returned, and when it was started by `time.monotonic()`.

    `others` is the share of the machine's processors that others used while it ran, 0 to 1; None: not known.
    """

    started: float
    others: float | None
    returned: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Processes:
    """Starts children one after another. `model` is a model's folder, None for `echo`; `folder` is for their files."""

    folder: Path
    threads: Threads
    model: Path | None

    def run(self, script: Path, python: str, workload: Rows, options: dict[str, Any]) -> Ended:
        """Waits for the script to end; raises ChildFailedError."""
        with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
            at = Path(scratch)
            workload.save(at / "rows.parquet")
            (at / "scratch").mkdir()
            given = {
                "model": None if self.model is None else str(self.model),
                "rows_file": str(at / "rows.parquet"),
                **workload.given(),
                "threads": len(self.threads.cpus),
                "is_pinned": self.threads.is_pinned,
                "options": options,
                "scratch": str(at / "scratch"),
            }
            (at / "given.json").write_text(json.dumps(given), encoding="utf-8")
            return self._run(script, python, at)

    def _run(self, script: Path, python: str, at: Path) -> Ended:
        command = [python, str(CHILDREN / "start.py"), str(script), str(at / "given.json"), str(at / "returned.json")]
        # A system-wide clock: the child's readings of it can be compared with ours.
        started, before = time.monotonic(), ProcessorTime.now(os.sysconf("SC_CLK_TCK"))
        with (at / "written").open("wb") as written:
            done = subprocess.run(
                command, stdout=written, stderr=written, check=False, cwd=at, env=self._environment(python)
            )
        if done.returncode != 0:
            raise ChildFailedError(done.returncode, (at / "written").read_text(errors="replace"))
        after = ProcessorTime.now(os.sysconf("SC_CLK_TCK"))
        others = None if before is None or after is None else after.others_since(before)
        return Ended(started, others, json.loads((at / "returned.json").read_text(encoding="utf-8")))

    def _environment(self, python: str) -> dict[str, str]:
        # Nothing beside start.py is meant to be imported, and a model is a folder here.
        chosen = {"PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1", **self.threads.environment}
        inherited = dict(os.environ)
        if python != sys.executable:
            # What makes modules importable for this Python is not meant for another one.
            inherited.pop("PYTHONPATH", None)
        return inherited | chosen
