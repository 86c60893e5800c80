"""An interrupt while Python waits for a job: drain, save at once, give up; and nothing left behind."""

import signal
import threading

import pytest

from batchrun.interrupts import draining_on_interrupt
from batchrun.stop import AT_ONCE, DRAIN, StopRequest


def test_the_third_interrupt_gives_up_and_the_handler_of_before_comes_back() -> None:
    before, stop, levels = signal.getsignal(signal.SIGINT), StopRequest(), []
    with draining_on_interrupt(stop):
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
            levels.append(stop.level)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert levels == [DRAIN, AT_ONCE]
    assert stop.signal_name == "SIGINT"
    assert signal.getsignal(signal.SIGINT) is before


def test_in_another_thread_nothing_changes() -> None:
    """Python refuses to set a handler there, and a job must run all the same."""
    before, seen = signal.getsignal(signal.SIGINT), []

    def work() -> None:
        with draining_on_interrupt(StopRequest()):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
