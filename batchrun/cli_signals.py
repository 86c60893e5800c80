"""SIGTERM and SIGINT while a job runs: first drain, then leave at once, then whatever the system does."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from batchrun.observe.events import Event, Observe, PlanProgress
from batchrun.stop import AT_ONCE, DRAIN, StopRequest

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SAID = {
    DRAIN: b"stopping: finishing the rows that run; once more saves them unfinished and leaves\n",
    AT_ONCE: b"stopping at once\n",
}


@contextmanager
def stopping_on_signals(stop: StopRequest) -> Iterator[None]:
    """Within the block the signals raise `stop`; a third one acts as if nobody listened."""

    def ask(number: int, frame: FrameType | None) -> None:
        level = stop.request(signal.Signals(number).name)
        if level == AT_ONCE:
            restore()
        # A handler may have interrupted a write to sys.stderr, which cannot be entered twice.
        os.write(2, _SAID[level])

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    before = {number: signal.getsignal(number) for number in _SIGNALS}
    for number in _SIGNALS:
        signal.signal(number, ask)
    try:
        yield
    finally:
        restore()


def giving_way(observe: Observe, stop: StopRequest) -> Observe:
    """`observe`, but planning ends at its next event once `stop` is raised; the run itself reads `stop`."""

    def observe_or_stop(event: Event) -> None:
        if stop.level and isinstance(event, PlanProgress):
            raise stop.error("the plan was not finished and nothing is kept of it")
        observe(event)

    return observe_or_stop
