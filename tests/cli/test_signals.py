"""The first signal drains, the second leaves, and the handlers of before come back."""

import os
import signal
import threading

import pytest

from batchrun.cli_signals import giving_way, stopping_on_signals
from batchrun.errors import Interrupted, StoppedEarly
from batchrun.observe.events import Event, Message, PlanProgress
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
    assert isinstance(interrupted.error("all saved"), Interrupted)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_raise_the_level_and_a_third_is_the_systems(number: signal.Signals) -> None:
    assert threading.current_thread() is threading.main_thread()
    seen: list[int] = []
    before = signal.signal(number, lambda received, frame: seen.append(received))
    try:
        stop = StopRequest()
        with stopping_on_signals(stop):
            levels = []
            for _ in range(3):
                os.kill(os.getpid(), number)
                levels.append(stop.level)
        assert (levels, stop.signal_name, seen) == ([1, 2, 2], number.name, [number])
        os.kill(os.getpid(), number)
        assert seen == [number, number]
    finally:
        signal.signal(number, before)


def test_planning_gives_way_at_its_next_event() -> None:
    seen: list[Event] = []
    stop = StopRequest()
    observe = giving_way(seen.append, stop)
    observe(PlanProgress(1))
    stop.request("SIGTERM")
    observe(Message("info", "still heard"))
    with pytest.raises(StoppedEarly, match="nothing is kept"):
        observe(PlanProgress(2))
    assert seen == [PlanProgress(1), Message("info", "still heard")]


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
