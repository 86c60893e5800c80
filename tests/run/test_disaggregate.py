"""Jobs with a process that computes prompts: the result is that of one engine, whichever process ends on the way."""

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun.errors import UsageError
from tests.run.conftest import EchoJob
from tests.run.test_kill import SLOW, committed
from tests.run.test_workers import submit_with, until

TWO = ("--disaggregate", *SLOW)
_WARNING = "the process that computes prompts"


def prefillers_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    children = psutil.Process(process.pid).children()
    return [child for child in children if "batchrun.executors.prefilling" in child.cmdline()]


@pytest.fixture
def undisturbed(echo_job: Any, tmp_path: Path) -> EchoJob:
    job: EchoJob = echo_job(1200, tmp_path / "undisturbed")
    job.submit(max_tokens=60)
    return job


@pytest.fixture
def job(echo_job: Any, tmp_path: Path) -> EchoJob:
    made: EchoJob = echo_job(1200, tmp_path / "job")
    return made


def started(job: EchoJob, has_begun: Callable[[], object]) -> tuple[subprocess.Popen[str], psutil.Process]:
    """A running job and its prefiller."""
    process = job.start("submit", *TWO)
    until(lambda: process.poll() is not None or has_begun())
    assert process.poll() is None, process.communicate()
    (prefiller,) = prefillers_of(process)
    return process, prefiller


def test_the_result_is_that_of_one_engine(job: EchoJob, undisturbed: EchoJob) -> None:
    done = job.call("submit", *TWO, "--json")
    assert done.returncode == 0, done.stderr
    assert _WARNING not in done.stderr
    assert job.result() == undisturbed.result()
    outcome = json.loads(done.stdout)
    assert outcome["swapped_bytes"] > 0
    assert outcome["preemptions"] == 0
    assert outcome["cached_tokens"] > 0


@pytest.mark.parametrize("host_blocks", [1, 40])
def test_with_little_room_to_hand_over_too(job: EchoJob, undisturbed: EchoJob, host_blocks: int) -> None:
    """Prompts that are larger than all of it are computed by the engine that decodes."""
    job.submit(max_tokens=60, disaggregate=True, swap_space=host_blocks * 16 * 8, kv_cache_memory=40 * 16 * 8)
    assert job.result() == undisturbed.result()


def test_samples_stop_strings_and_rows_with_their_own_parameters(job: EchoJob, tmp_path: Path) -> None:
    table = pq.read_table(job.source)
    own = [[None, {"max_tokens": 3}, {"stop": ["a", "qu"]}, {"max_tokens": 0}][row % 4] for row in range(len(table))]
    params = pa.array([json.dumps(one) if one else None for one in own], pa.string())
    pq.write_table(table.append_column("params", params), job.source)
    results = []
    for disaggregate in (False, True):
        options = {"params_col": "params", "n": 3, "stop": ("zz", "e"), "logprobs": 1, "max_tokens": 20}
        job.submit(disaggregate=disaggregate, overwrite=True, **options)
        results.append(job.result())
    assert results[0] == results[1]
    assert {row["finish_reason"] for row in job.rows()} == {"stop", "length", "error"}


def test_when_the_prefiller_is_killed_the_rest_is_computed_without_it(job: EchoJob, undisturbed: EchoJob) -> None:
    process, prefiller = started(job, lambda: committed(job))
    prefiller.kill()
    _, said = process.communicate()
    assert process.returncode == 0, said
    assert said.count(_WARNING) == 1
    assert "was killed by signal 9; the rest of the job is computed without it" in said
    assert job.result() == undisturbed.result()


def test_a_job_that_is_stopped_goes_on_with_its_saved_tokens(job: EchoJob, undisturbed: EchoJob) -> None:
    process, prefiller = started(job, lambda: committed(job))
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate()
    assert process.returncode == 75, said
    assert not prefiller.is_running()
    done = job.call("submit", *TWO)
    assert done.returncode == 0, done.stderr
    assert job.result() == undisturbed.result()


def test_the_prefiller_ends_with_a_job_that_is_killed(job: EchoJob, undisturbed: EchoJob) -> None:
    process, prefiller = started(job, lambda: committed(job))
    process.kill()
    process.communicate()
    until(lambda: not prefiller.is_running() or prefiller.status() == psutil.STATUS_ZOMBIE)
    # It may go on with one engine, too.
    assert job.call("submit", *SLOW).returncode == 0
    assert job.result() == undisturbed.result()


def test_a_prefiller_that_falls_over_in_a_step_leaves_its_rows(job: EchoJob, undisturbed: EchoJob) -> None:
    """What is no exception of a row ends that process, and the other one goes on."""
    code = """
import sys
from batchrun.engine.prefill_engine import PrefillEngine
def step(self):
    raise MemoryError("no room")
PrefillEngine.step = step
"""
    done = submit_with(job, job.folder / "code", code, *TWO)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("has failed: MemoryError: no room; the rest of the job") == 1
    assert job.result() == undisturbed.result()


@pytest.mark.parametrize(
    ("deed", "code", "said"),
    [
        ("raise ModelUnavailable('there is no such model')", 69, "there is no such model"),
        ("os._exit(3)", 70, "the process that computes prompts ended with code 3 while it loaded"),
    ],
)
def test_what_the_prefiller_cannot_load_for_ends_the_job(job: EchoJob, deed: str, code: int, said: str) -> None:
    spoiled = f"""
import os, sys
if "batchrun.executors.prefilling" in sys.orig_argv:
    from batchrun.engine.echo import EchoRunner
    from batchrun.errors import ModelUnavailable
    def fall_over(self, *args, **options):
        {deed}
    EchoRunner.__init__ = fall_over
"""
    done = submit_with(job, job.folder / "code", spoiled, *TWO)
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr


def test_swap_space_that_holds_no_block_is_refused(job: EchoJob) -> None:
    with pytest.raises(UsageError, match="--swap-space holds no block of 128 bytes to hand over; raise it"):
        job.submit(disaggregate=True, swap_space=127)
