"""The first signal drains, the second leaves, and any number of them end the program by its exit code."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchrun.cli_signals import interrupt_once, stopping_on_signals
from batchrun.errors import StoppedByUser, StoppedEarly
from batchrun.stop import AT_ONCE, DRAIN, StopRequest
from tests.cli.fake_library import Library, Run


def test_level_rises_to_at_once_and_the_first_signal_names_the_end() -> None:
    stop = StopRequest()
    assert [stop.level, stop.request("SIGTERM"), stop.request("SIGINT"), stop.request("SIGINT")] == [0, 1, 2, 2]
    assert (DRAIN, AT_ONCE) == (1, 2)
    error = stop.error("7 of 63 rows are committed")
    assert isinstance(error, StoppedEarly)
    assert str(error) == "stopped by SIGTERM: 7 of 63 rows are committed; the same command goes on from here"
    interrupted = StopRequest()
    interrupted.request("SIGINT")
    assert isinstance(interrupted.error("all saved"), StoppedByUser)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """A stopped program hears no signal any more; the tests' does."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("number", "ended"), [(signal.SIGTERM, StoppedEarly), (signal.SIGINT, StoppedByUser)], ids=["SIGTERM", "SIGINT"]
)
def test_signals_raise_the_level_a_third_leaves_and_the_rest_is_not_heard(
    number: signal.Signals, ended: type[BaseException]
) -> None:
    assert threading.current_thread() is threading.main_thread()
    stop = StopRequest()
    levels: list[int] = []

    def run() -> None:
        with stopping_on_signals(stop):
            try:
                for _ in range(3):
                    os.kill(os.getpid(), number)
                    levels.append(stop.level)
            finally:
                os.kill(os.getpid(), number)
                levels.append(-1)

    with pytest.raises(ended, match="what was committed is kept; the same command goes on"):
        run()
    os.kill(os.getpid(), number)
    assert (levels, stop.signal_name) == ([1, 2, -1], number.name)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_as_before_after_a_job_that_was_not_stopped(number: signal.Signals) -> None:
    seen: list[int] = []
    signal.signal(number, lambda received, frame: seen.append(received))
    with stopping_on_signals(StopRequest()):
        pass
    os.kill(os.getpid(), number)
    assert seen == [number]


def test_outside_of_jobs_one_interrupt_ends_the_program_and_the_rest_is_not_heard() -> None:
    signal.signal(signal.SIGINT, interrupt_once)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("is_job", [True, False])
def test_signals_in_the_middle_of_an_import_end_the_program_by_its_exit_code(tmp_path: Path, is_job: bool) -> None:
    """Caught and answered with 130, the program was killed by the signal all the same."""
    block = "stopping_on_signals(StopRequest())" if is_job else "nullcontext()"
    (tmp_path / "program.py").write_text(f"""
import os, signal, sys
from contextlib import nullcontext
from batchrun.cli_signals import interrupt_once, stopping_on_signals
from batchrun.errors import StoppedByUser
from batchrun.stop import StopRequest
signal.signal(signal.SIGINT, interrupt_once)
try:
    with {block}:
        exec("for _ in range(4): os.kill(os.getpid(), signal.SIGINT)")
except (KeyboardInterrupt, StoppedByUser):
    sys.exit(130)
""")
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    program = subprocess.run([sys.executable, "-m", "program"], env=os.environ | {"PYTHONPATH": path}, check=False)
    assert program.returncode == 130


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_drained_job_ends_with_the_signals_exit_code(
    library: Library, run: Run, number: signal.Signals, exit_code: int
) -> None:
    def drain(observe: object, stop: StopRequest) -> None:
        os.kill(os.getpid(), number)
        raise stop.error("7 of 63 rows are committed")

    library.during = drain
    result = run("submit", "a", "-o", "out", "-q")
    assert (result.exit_code, result.stdout) == (exit_code, "")
    assert result.stderr == (
        f"error: stopped by {number.name}: 7 of 63 rows are committed; the same command goes on from here\n"
    )
