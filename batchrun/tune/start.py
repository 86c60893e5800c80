"""How long a job takes to begin and to end, apart from its engine: measured with processes like a job's."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from batchrun import __version__
from batchrun.checkpoint import Checkpoint
from batchrun.child import same_modules
from batchrun.errors import EngineFailed
from batchrun.executors.messages import Brief, Ended, Lost, Ready
from batchrun.executors.processes import LocalProcesses
from batchrun.job import Job
from batchrun.plan.plan import PlanSummary, load_plan
from batchrun.store.durable import storage_errors
from batchrun.store.layout import Layout
from batchrun.tune.profile import Start

# What jobs to come are to do, and where they are to tell of themselves.
_FOR_JOBS = ("BATCHRUN_", "OTEL_")
# Of a model without weights, so that nothing is loaded for it.
_SUBMIT = ("submit", "row.jsonl", "-m", "echo", "--max-tokens", "1", "-o", "out", "-q")


def measure_start(job: Job, checkpoint: Checkpoint, cache: Path, clock: Callable[[], float]) -> Start:
    """Runs a job of one row, and a worker that loads the job's model as far as to its first step; `clock` in seconds.

    Raises:
        ModelUnavailable, UsageError: as a worker does.
        EngineFailed: either process ended before.
        StorageFailed: the cache, in which the job has its folder, cannot be written to.
    """
    with storage_errors(cache):
        cache.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=cache, prefix=".start-") as scratch:
            job_s = _time_job(Path(scratch), clock)
            plan = load_plan(Layout(Path(scratch) / "out").plan)
    assert plan is not None, "a job that is complete has a plan"
    return Start(job_s=job_s, worker_s=_time_worker(job, checkpoint, plan.summary, clock))


def _time_job(folder: Path, clock: Callable[[], float]) -> float:
    (folder / "row.jsonl").write_text('{"prompt": "x"}\n', encoding="utf-8")
    env = {name: value for name, value in os.environ.items() if not name.startswith(_FOR_JOBS)} | same_modules()
    began = clock()
    ran = subprocess.run(
        [sys.executable, "-P", "-m", "batchrun", *_SUBMIT], cwd=folder, env=env, capture_output=True, text=True
    )
    seconds = clock() - began
    if ran.returncode:
        reason = ran.stderr.strip() or f"exit code {ran.returncode}"
        raise EngineFailed(f"a job of one row could not be timed: {reason}")
    return seconds


def _time_worker(job: Job, checkpoint: Checkpoint, plan: PlanSummary, clock: Callable[[], float]) -> float:
    fleet = LocalProcesses(1)
    began = clock()
    fleet.start(0, Brief(job, plan, checkpoint.spec.digest, __version__, log_level=logging.WARNING))
    try:
        while True:
            for _, message in fleet.receive(1.0):
                match message:
                    case Ready():
                        return clock() - began
                    case Ended(error=error) if error is not None:
                        raise error
                    case Lost():
                        raise EngineFailed(f"a worker could not be timed: {message.reason}")
    finally:
        fleet.end(0)
