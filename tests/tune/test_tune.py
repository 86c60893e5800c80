"""From measuring to a plan that says how long it will take, and a job that runs as it was tuned."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from batchrun import lifecycle
from batchrun.checkpoint import Checkpoint
from batchrun.engine.step_time import StepSize
from batchrun.executors import local
from batchrun.job import Job
from batchrun.observe.events import Event, Message
from batchrun.stop import StopRequest
from batchrun.tune import tune as subject
from batchrun.tune.choice import Weights
from batchrun.tune.profile import Start, find
from tests.run.conftest import EchoJob, environment, ignore
from tests.tune.devices import TIMES, TimedEcho
from tests.tune.profiles import SPEC

MakeJob = Callable[[int], EchoJob]
ROWS_FIRST = Weights(alpha=1.0, beta=0.0)
START = Start(job_s=1.25, worker_s=6.5)


def model_job(**options: object) -> Job:
    return Job.load({"inputs": ("none",), "output": "none", "model": "echo", **options})


def tuned(cache: Path, monkeypatch: pytest.MonkeyPatch, weights: Weights = ROWS_FIRST) -> subject.Tuned:
    """On a device whose steps take a known time."""
    device = TimedEcho()
    monkeypatch.setattr(subject, "_BUDGET_S", 1e9)
    monkeypatch.setattr(subject, "measure_start", lambda *of: START)
    monkeypatch.setattr(subject, "build_runner", lambda job, checkpoint: device)
    monkeypatch.setattr(subject, "_measure_rates", lambda job: subject._Rates(flops_per_s=1e12, bytes_per_s=1e10))
    return subject.tune(
        model_job(), Checkpoint(SPEC, None), weights, cache, is_quick=False, observe=ignore, clock=device.clock
    )


def test_the_profile_is_of_the_device_that_was_measured(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tuned(cache, monkeypatch).profile
    assert find(cache, model_job(), SPEC) == found
    assert (found.flops_per_s, found.bytes_per_s, found.start) == (1e12, 1e10, START)
    assert found.worst_error < 1e-6
    size = StepSize(num_tokens=301, num_rows=17, num_sampled=16, kv_tokens=4000, pairs=90_000)
    assert found.times.seconds(size) == pytest.approx(TIMES.seconds(size))
    assert (found.pool.pool_bytes, found.pool.kv_bytes_per_token, found.pool.is_gpu) == (4096 * 16 * 8, 8, False)


def test_the_weights_choose_the_steps(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, tokens = (tuned(cache, monkeypatch, each).profile for each in (Weights(1.0, 0.0), Weights(0.0, 1.0)))
    assert (tokens.max_num_seqs, tokens.max_num_batched_tokens) == (8, 64)
    assert rows.max_num_batched_tokens > tokens.max_num_batched_tokens
    assert (tokens.alpha, tokens.beta) == (0.0, 1.0)


def test_a_job_runs_in_the_steps_that_were_found_best_and_says_so(
    cache: Path, monkeypatch: pytest.MonkeyPatch, echo_job: MakeJob
) -> None:
    profile = tuned(cache, monkeypatch, Weights(0.0, 1.0)).profile
    assert profile.max_num_seqs == 8
    events: list[Event] = []
    device = TimedEcho()
    monkeypatch.setattr(local, "build_runner", lambda job, checkpoint, place: device)
    lifecycle.submit(echo_job(50).job(), events.append, StopRequest())
    assert max(len(batch.items) for batch in device.batches) == 8
    assert max(batch.num_tokens for batch in device.batches) == 64
    said = next(event.text for event in events if isinstance(event, Message))
    assert said.startswith("steps of at most 64 tokens and 8 rows, as tuned ")
    assert "--max-num-seqs" in said


def test_a_job_that_says_how_large_its_steps_are_is_obeyed(
    cache: Path, monkeypatch: pytest.MonkeyPatch, echo_job: MakeJob
) -> None:
    tuned(cache, monkeypatch, Weights(0.0, 1.0))
    events: list[Event] = []
    device = TimedEcho()
    monkeypatch.setattr(local, "build_runner", lambda job, checkpoint, place: device)
    lifecycle.submit(echo_job(50).job(max_num_seqs=20), events.append, StopRequest())
    assert max(len(batch.items) for batch in device.batches) == 20
    assert not [event for event in events if isinstance(event, Message) and "as tuned" in event.text]


def test_the_text_does_not_depend_on_it(cache: Path, monkeypatch: pytest.MonkeyPatch, echo_job: MakeJob) -> None:
    job = echo_job(50)
    job.submit()
    before = job.result()
    tuned(cache, monkeypatch, Weights(0.0, 1.0))
    job.submit(overwrite=True)
    assert job.result() == before


def test_tune_then_plan_from_the_command_line(echo_job: MakeJob) -> None:
    job = echo_job(20)
    assert "batchrun tune echo measures" in job.call("plan", str(job.source), "-m", "echo", "-o", str(job.out)).stdout
    measured = job.call("tune", "echo", "--quick", "--json", "--progress", "none")
    assert measured.returncode == 0, measured.stderr
    profile = json.loads(measured.stdout)
    assert Path(profile["file"]).is_file()
    assert profile["flops_per_s"] > 0
    assert profile["bytes_per_s"] > 0
    assert profile["start"]["job_s"] > 0
    assert profile["start"]["worker_s"] > 0
    assert [*Path(profile["file"]).parents[1].iterdir()] == [Path(profile["file"]).parent]
    planned = job.call("plan", str(job.source), "-m", "echo", "-o", str(job.out), "--json")
    assert json.loads(planned.stdout)["estimate"]["num_simulated"] == len(set(job.prompts))


def test_a_plan_with_an_estimate_needs_no_torch(
    cache: Path, monkeypatch: pytest.MonkeyPatch, echo_job: MakeJob
) -> None:
    job = echo_job(20)
    tuned(cache, monkeypatch)
    arguments = ["plan", str(job.source), "-m", "echo", "-o", str(job.out)]
    program = f"""
import sys
from batchrun.cli import batchrun
try:
    batchrun({arguments!r})
except SystemExit as end:
    assert not end.code
print("torch" in sys.modules)
"""
    shown = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, check=True
    )
    assert "about " in shown.stdout
    assert shown.stdout.splitlines()[-1] == "False"


def test_a_time_too_short_for_large_steps_is_warned_of(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Event] = []
    device = TimedEcho()
    monkeypatch.setattr(subject, "_QUICK_BUDGET_S", 0.0)
    monkeypatch.setattr(subject, "measure_start", lambda *of: START)
    monkeypatch.setattr(subject, "build_runner", lambda job, checkpoint: device)
    monkeypatch.setattr(subject, "_measure_rates", lambda job: subject._Rates(flops_per_s=1e12, bytes_per_s=1e10))
    model, job = Checkpoint(SPEC, None), model_job()
    subject.tune(job, model, ROWS_FIRST, cache, is_quick=True, observe=events.append, clock=device.clock)
    (said,) = [event for event in events if isinstance(event, Message)]
    assert said.level == "warning"
    assert said.text.startswith("only steps of up to 1 tokens could be measured")
