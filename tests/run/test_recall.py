"""A job that is called back: by its deadline, or by `batchrun cancel` from anywhere."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from datetime import datetime
from datetime import time as time_of_day
from pathlib import Path

import pytest

from batchrun import lifecycle, planning
from batchrun.errors import StoppedEarly, UsageError
from batchrun.job import Job
from batchrun.observe.events import Message, PlanProgress
from batchrun.recall import Recall, giving_way, seconds_until
from batchrun.retry import retry
from batchrun.stop import StopRequest
from batchrun.store.at_hand import Here
from batchrun.store.cancel import cancel
from batchrun.store.layout import Layout
from tests.run.conftest import environment
from tests.run.test_kill import REST, SLOW, committed


def levels(job: Job, out: Path, seconds: range) -> list[int]:
    """How strongly the job is asked to stop at each of the seconds, with a sign of progress in every one."""
    clock = itertools.count()
    stop = StopRequest()
    observe = Recall(job, Layout(out), stop, clock=lambda: float(next(clock))).heeded_by(lambda event: None)
    found = []
    for _ in seconds:
        observe(PlanProgress(1))
        found.append(stop.level)
    assert stop.signal_name in (None, "--deadline", "batchrun cancel")
    return found


def job_with(out: Path, **options: object) -> Job:
    return Job.load({"inputs": ("a.parquet",), "output": str(out), "model": "echo", **options})


@pytest.mark.parametrize(
    ("deadline", "drain", "drains_at", "saves_at"),
    [
        ("100s", "45s", 53, 98),
        # Never more than half of the time for the drain, and less for saving where time is short.
        ("60s", "45s", 30, 58),
        ("10s", "45s", 5, 9),
        ("100s", "0s", 98, 98),
    ],
)
def test_deadline_leaves_time_to_drain_and_to_save(tmp_path, deadline, drain, drains_at, saves_at):
    found = levels(job_with(tmp_path / "out", deadline=deadline, drain_timeout=drain), tmp_path / "out", range(1, 121))
    assert (found.count(0), found.count(0) + found.count(1)) == (drains_at - 1, saves_at - 1)


def test_a_job_without_a_deadline_is_not_called_back(tmp_path):
    assert set(levels(job_with(tmp_path / "out"), tmp_path / "out", range(100_000))) == {0}


@pytest.mark.parametrize(
    ("deadline", "now", "seconds"),
    [
        (5.0, datetime(2026, 11, 30, 9), 5.0),
        (time_of_day(6), datetime(2026, 11, 30, 5, 59, 30), 30.0),
        (time_of_day(6), datetime(2026, 11, 30, 6), 86_400.0),
        (time_of_day(6), datetime(2026, 12, 31, 22), 8 * 3600.0),
    ],
)
def test_a_time_of_day_is_the_next_one(deadline, now, seconds):
    assert seconds_until(deadline, now) == seconds


def test_a_night_that_is_an_hour_shorter_is_counted_so(monkeypatch):
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        assert seconds_until(time_of_day(6), datetime(2026, 3, 28, 22)) == 7 * 3600
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("deadline", ["06:00", "3h"])
def test_a_deadline_is_stored_and_read_back(tmp_path, deadline):
    job = job_with(tmp_path / "out", deadline=deadline)
    assert job.deadline in (time_of_day(6), 10_800.0)
    assert Job.model_validate(json.loads(json.dumps(job.model_dump(mode="json")))) == job


@pytest.mark.parametrize("deadline", ["soon", "25:00", "0s", "-3h", True])
def test_what_is_no_deadline_is_refused(tmp_path, deadline):
    with pytest.raises(UsageError, match="--deadline should be a duration such as 3h, or a time of day such as 06:00"):
        job_with(tmp_path / "out", deadline=deadline)


def test_job_stops_at_its_deadline_and_the_same_command_goes_on(echo_job):
    job = echo_job(3000)
    slowest = ("--max-num-seqs", "1", "--max-num-batched-tokens", "2")
    stopped = job.call("submit", *SLOW, *slowest, "--deadline", "1s", "--drain-timeout", "0.2s")
    assert stopped.returncode == 75, stopped.stderr
    assert "stopped by --deadline: " in stopped.stderr
    assert not job.out.exists()
    assert job.call("submit", *REST).returncode == 0
    assert len(job.rows()) == 3000


def test_cancel_stops_the_running_process_and_is_forgotten_afterwards(echo_job):
    job = echo_job(3000)
    process = job.start("submit", *SLOW)
    while process.poll() is None and not committed(job):
        time.sleep(0.05)
    asked = job.call("cancel", str(job.out))
    assert (asked.returncode, asked.stderr) == (0, "")
    assert asked.stdout.startswith(f"asked process {process.pid} on ")
    stderr = process.communicate()[1]
    assert process.returncode == 75
    assert "stopped by batchrun cancel: " in stderr
    assert job.call("resume", str(job.out)).returncode == 0


def test_cancel_of_a_job_that_nobody_works_on_leaves_nothing(echo_job):
    job = echo_job(20)
    job.submit()
    assert cancel(Here(Layout(job.out))) is None
    assert not Layout(job.out).cancel.exists()
    told = job.call("cancel", str(job.out), "--json")
    assert json.loads(told.stdout) == {"output": str(job.out), "holder": None}
    assert job.call("cancel", str(job.folder / "other")).returncode == 66


def test_planning_gives_way_at_its_next_event():
    seen: list[object] = []
    stop = StopRequest()
    observe = giving_way(seen.append, stop)
    observe(PlanProgress(1))
    stop.request("SIGTERM")
    observe(Message("info", "still heard"))
    with pytest.raises(StoppedEarly, match="nothing is kept"):
        observe(PlanProgress(2))
    assert seen == [PlanProgress(1), Message("info", "still heard")]


@pytest.mark.parametrize("verb", ["plan", "submit", "retry"])
def test_cancel_is_heeded_while_a_plan_is_made_and_nothing_is_changed(echo_job, monkeypatch, verb):
    """A plan or a retry went on planning, however long that took."""
    monkeypatch.setattr("batchrun.recall._LOOK_EVERY_S", 0.0)
    job = echo_job(50)
    if verb == "retry":
        job.submit()
    before = sorted(path for path in job.folder.rglob("*") if path.name != "cancel")

    def ask(event):
        if isinstance(event, PlanProgress):
            Layout(job.out).cancel.touch()

    work = {
        "plan": lambda: planning.plan(job.job(), ask, StopRequest()),
        "submit": lambda: lifecycle.submit(job.job(), ask, StopRequest()),
        "retry": lambda: retry(job.out, "true", {"max_tokens": 3}, ask, StopRequest()),
    }
    with pytest.raises(StoppedEarly, match="stopped by batchrun cancel: the plan was not finished"):
        work[verb]()
    assert sorted(path for path in job.folder.rglob("*") if path.name != "cancel") == before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_stops_planning_by_the_exit_code(echo_job, number, code):
    """SIGTERM killed the process, which left its lock behind."""
    job = echo_job(40_000)
    process = subprocess.Popen(
        [sys.executable, "-m", "batchrun", "plan", str(job.source), "-m", "echo", "-o", str(job.out)],
        stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(),
    )  # fmt: skip
    while process.poll() is None and not Layout(job.out).holder.exists():
        time.sleep(0.005)
    process.send_signal(number)
    stderr = process.communicate()[1]
    assert process.returncode == code, stderr
    assert f"stopped by {number.name}: the plan was not finished" in stderr
    assert not Layout(job.out).folder.exists()


def test_what_else_a_job_says_passes_unheeded(tmp_path):
    seen: list[object] = []
    stop = StopRequest()
    observe = Recall(job_with(tmp_path / "out", deadline="1s"), Layout(tmp_path / "out"), stop).heeded_by(seen.append)
    observe(Message("info", "loading"))
    assert (seen, stop.level) == ([Message("info", "loading")], 0)


def test_sigterm_to_the_process_group_twice_and_sigkill_after_the_grace_time_lose_no_committed_row(echo_job):
    """As Slurm, Kubernetes and Airflow end a task: everybody in the group hears it, and not once."""
    job = echo_job(3000)
    process = job.start("submit", *SLOW, start_new_session=True)
    while process.poll() is None and not committed(job):
        time.sleep(0.05)
    before = set(committed(job))
    for _ in range(2):
        os.killpg(process.pid, signal.SIGTERM)
        time.sleep(0.2)
    stderr = process.communicate(timeout=60)[1]
    assert process.returncode == 75, stderr
    after = committed(job)
    assert before <= set(after)
    assert len(after) == len(set(after))

    process = job.start("submit", *SLOW, "--drain-timeout", "1h", start_new_session=True)
    while process.poll() is None and len(committed(job)) == len(after):
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGTERM)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert job.call("submit", *REST).returncode == 0
    assert len(job.rows()) == 3000
