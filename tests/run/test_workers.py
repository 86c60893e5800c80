"""Jobs with several workers on this machine: the result is that of one, whoever dies on the way."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from batchrun.executors import fleets
from batchrun.store import partial
from batchrun.store.layout import Layout
from tests.run.conftest import EchoJob, echo_text, environment
from tests.run.test_kill import REST, SLOW, committed

# Python imports this before anything else, in the workers too.
_FALLS_OVER = """
import os
from batchrun.engine.echo import EchoRunner
launch = EchoRunner.launch
def fall_over(self, batch):
    if any(item.sequence.request.row_idx == 5 for item in batch.items):
        {deed}
    return launch(self, batch)
EchoRunner.launch = fall_over
"""


def until(happens: Callable[[], object]) -> None:
    for _ in range(6000):
        if happens():
            return
        time.sleep(0.02)
    raise AssertionError("it does not happen")


def workers_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return [child for child in psutil.Process(process.pid).children() if "batchrun.executors" in str(child.cmdline())]


def submit_with(job: EchoJob, folder: Path, code: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs the job in processes that begin with this code."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(code)
    env = environment()
    env["PYTHONPATH"] = f"{folder}{os.pathsep}{env['PYTHONPATH']}"
    return subprocess.run(job.command("submit", *options), capture_output=True, text=True, env=env, check=False)


@pytest.fixture
def undisturbed(echo_job: Any, tmp_path: Path) -> EchoJob:
    job: EchoJob = echo_job(1200, tmp_path / "undisturbed")
    job.submit(max_tokens=60)
    return job


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n": 3, "temperature": 0.8},
        {"num_beams": 2, "max_tokens": 12},
        {"task": "choose", "choice": (" yes", " no")},
        {"task": "embed"},
    ],
    ids=["text", "samples", "beams", "choose", "embed"],
)
def test_the_result_is_that_of_one_worker_to_the_byte(echo_job: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    results = []
    for workers in (1, 2, 3):
        job = echo_job(150, tmp_path / str(workers))
        outcome = job.submit(workers=workers, **options)
        assert outcome.rows == 150 * options.get("n", 1)
        results.append(job.result())
    assert results[1] == results[0]
    assert results[2] == results[0]


def test_one_worker_is_this_process(echo_job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets, "run", lambda *_: pytest.fail("a fleet for one worker"))
    assert echo_job(20).submit(workers=1).rows == 20


def test_figures_of_all_workers_are_in_one_outcome(echo_job: Any, tmp_path: Path) -> None:
    alone = echo_job(300, tmp_path / "alone").submit()
    outcome = echo_job(300, tmp_path / "together").submit(workers=2)
    assert outcome.prompt_tokens == alone.prompt_tokens
    assert outcome.output_tokens == alone.output_tokens
    assert outcome.cached_tokens >= 0.97 * alone.cached_tokens
    assert outcome.latencies.first_token.count == alone.latencies.first_token.count


def test_a_worker_that_is_killed_costs_nothing(echo_job: Any, undisturbed: EchoJob) -> None:
    job = echo_job(1200)
    process = job.start("submit", *SLOW, "--workers", "2")
    until(lambda: committed(job) or process.poll() is not None)
    workers_of(process)[0].kill()
    _, stderr = process.communicate()
    assert process.returncode == 0, stderr
    assert "worker 0 is lost (ended by SIGKILL); others go on with its rows" in stderr
    assert len(committed(job)) == len({*committed(job)}) == 1200
    assert job.result() == undisturbed.result()


def test_workers_end_with_a_killed_driver_and_any_number_goes_on(echo_job: Any, undisturbed: EchoJob) -> None:
    job = echo_job(1200)
    process = job.start("submit", *SLOW, "--workers", "2")
    until(lambda: committed(job) or process.poll() is not None)
    workers = workers_of(process)
    assert len(workers) == 2
    process.kill()
    process.communicate()
    until(lambda: not any(worker.is_running() for worker in workers))
    num_done = len(committed(job))
    assert 0 < num_done < 1200
    assert job.call("submit", *REST, "--workers", "3").returncode == 0
    assert job.result() == undisturbed.result()


def test_a_drain_saves_the_tokens_of_all_workers(echo_job: Any, undisturbed: EchoJob) -> None:
    job = echo_job(1200)
    process = job.start("submit", *SLOW, "--workers", "2", "--drain-timeout", "0s")
    # Each runs four at a time.
    until(lambda: len(partial.load(Layout(job.out)).keys() - committed(job)) > 4 or process.poll() is not None)
    workers = workers_of(process)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate()
    assert process.returncode == 75, stderr
    assert not any(worker.is_running() for worker in workers)
    assert len(partial.load(Layout(job.out)).keys() - committed(job)) > 4, "of one worker only"
    assert job.call("submit", *REST).returncode == 0
    assert job.result() == undisturbed.result()


def test_what_a_worker_cannot_do_ends_the_job_with_its_message(echo_job: Any) -> None:
    ended = echo_job(20).call("submit", "--workers", "2", "--kv-cache-memory", "1KiB", "-q")
    assert ended.returncode == 65
    assert ended.stderr.count("\n") == 1
    assert "the longest row needs KV for" in ended.stderr


def test_a_row_that_takes_its_process_down_is_not_tried_for_ever(echo_job: Any, tmp_path: Path) -> None:
    """First beside others, then alone, then no more; those that ran beside it are answered."""
    job = echo_job(40)
    code = _FALLS_OVER.format(deed="os._exit(9)")
    ended = submit_with(job, tmp_path / "path", code, "--workers", "2", "--max-tokens", "40", "--progress", "none")
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("is lost (exit code 9)") == 2
    for row, prompt in zip(job.rows(), job.prompts, strict=True):
        if row["row_idx"] == 5:
            assert row["error"]["message"] == "2 processes of the job ended while this row ran"
        else:
            assert row["text"] == echo_text(prompt, 40)


def test_a_stuck_worker_is_given_up_and_its_stack_is_kept(echo_job: Any, tmp_path: Path) -> None:
    job = echo_job(40)
    code = _FALLS_OVER.format(deed="import time; time.sleep(100)")
    options = ("--workers", "2", "--max-tokens", "40", "--step-timeout", "1s", "--progress", "none")
    ended = submit_with(job, tmp_path / "path", code, *options)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("a step did not end within 1 s (--step-timeout)") == 2
    assert "in fall_over" in Layout(job.out).stuck.read_text()
    assert [row["row_idx"] for row in job.rows() if row["error"]] == [5]


def test_workers_that_all_fall_over_end_the_job(echo_job: Any, tmp_path: Path) -> None:
    code = "import os, sys\nif 'batchrun.executors.processes' in sys.orig_argv: os._exit(3)\n"
    ended = submit_with(echo_job(10), tmp_path / "path", code, "--workers", "2", "-q")
    assert ended.returncode == 70
    assert "no worker can be started: exit code 3" in ended.stderr


def test_the_job_of_a_program_without_a_main_guard_has_workers(echo_job: Any) -> None:
    """A worker does not run the program that it works for once more."""
    job = echo_job(30)
    program = job.folder / "program.py"
    options = f"output={str(job.out)!r}, model='echo', workers=2"
    program.write_text(f"import batchrun as br\nprint(br.submit({str(job.source)!r}, {options}).rows)")
    ended = subprocess.run([sys.executable, program], capture_output=True, text=True, env=environment(), check=False)
    assert ended.stdout == "30\n", ended.stderr
