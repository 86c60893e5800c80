"""Jobs with a process that computes prompts: the result is that of one engine, whichever process ends on the way."""

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun import lifecycle
from batchrun.errors import EngineFailed, UsageError
from batchrun.observe.events import Event, RunProgress
from batchrun.stop import StopRequest
from batchrun.store.layout import Layout
from tests.run.conftest import EchoJob, environment
from tests.run.test_kill import SLOW, committed
from tests.run.test_workers import submit_with, until

TWO = ("--disaggregate", *SLOW)
_WARNING = "the process that computes prompts"
# The beginning of a `sitecustomize` whose next lines are for the prefiller.
_IN_PREFILLER = """
import os, sys
if "batchrun.executors.prefilling" in sys.orig_argv:
"""


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


def test_blocks_that_mean_something_else_are_not_handed_over(job: EchoJob) -> None:
    """As where two GPUs differ, or one process has no compiled kernel."""
    spoiled = f"""
{_IN_PREFILLER}
    from batchrun.engine.echo import EchoRunner
    from batchrun.engine.prefill_engine import PrefillEngine
    init = PrefillEngine.__init__
    def other(self, config, runner):
        runner.block_format = "128 bytes of something else"
        init(self, config, runner)
    PrefillEngine.__init__ = other
"""
    done = submit_with(job, job.folder / "code", spoiled, *TWO)
    assert done.returncode == 2, done.stderr
    assert "cannot hand over blocks of 128 bytes of something else where others are of 128 bytes;" in done.stderr


def test_a_stuck_prefiller_is_given_up_and_leaves_nothing_behind(job: EchoJob) -> None:
    """The call returns when nobody has its stderr any more."""
    stuck = f"""
{_IN_PREFILLER}
    import time
    from batchrun.engine.prefill_engine import PrefillEngine
    PrefillEngine.step = lambda self: time.sleep(1000)
"""
    done = submit_with(job, job.folder / "code", stuck, *TWO, "--step-timeout", "1s")
    assert done.returncode == 70, done.stderr
    assert "a step did not end within 1 s (--step-timeout)" in done.stderr
    assert "rows at the prefiller" in Layout(job.out).stuck.read_text()


def test_a_prefiller_ends_with_a_job_that_is_killed_while_it_loads(job: EchoJob) -> None:
    folder = job.folder / "code"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(f"""
{_IN_PREFILLER}
    import time
    from batchrun.engine.echo import EchoRunner
    EchoRunner.__init__ = lambda self, *args, **options: time.sleep(1000)
""")
    paths = os.pathsep.join([str(folder), environment()["PYTHONPATH"]])
    process = subprocess.Popen(
        job.command("submit", *TWO), stderr=subprocess.PIPE, env=environment() | {"PYTHONPATH": paths}
    )
    until(lambda: prefillers_of(process))
    (prefiller,) = prefillers_of(process)
    process.kill()
    process.communicate()
    until(lambda: not prefiller.is_running() or prefiller.status() == psutil.STATUS_ZOMBIE)


def test_it_has_the_modules_of_the_process_that_starts_it(job: EchoJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not just those of an installation."""
    (job.folder / "sitecustomize.py").write_text(f"{_IN_PREFILLER}\n    os._exit(3)\n")
    monkeypatch.syspath_prepend(job.folder)
    with pytest.raises(EngineFailed, match="ended with code 3 while it loaded"):
        job.submit(disaggregate=True)


def test_its_processor_time_counts(job: EchoJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of workers does."""
    (job.folder / "sitecustomize.py").write_text(f"""
{_IN_PREFILLER}
    import time
    from batchrun.engine.prefill_engine import PrefillEngine
    advance = PrefillEngine._advance
    def burn(self):
        PrefillEngine._advance = advance
        while time.process_time() - self._busy_before < 5:
            pass
        return advance(self)
    PrefillEngine._advance = burn
""")
    monkeypatch.syspath_prepend(job.folder)
    events: list[Event] = []
    lifecycle.submit(job.job(disaggregate=True, limit=20), events.append, StopRequest())
    assert [event for event in events if isinstance(event, RunProgress)][-1].busy_s >= 5


def test_where_processes_share_no_memory_it_is_refused(job: EchoJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(UsageError, match=r"--disaggregate needs memory that processes share, .* on Linux only"):
        job.submit(disaggregate=True)


def test_swap_space_that_holds_no_block_is_refused(job: EchoJob) -> None:
    with pytest.raises(UsageError, match="--swap-space holds no block of 128 bytes to hand over; raise it"):
        job.submit(disaggregate=True, swap_space=127)
