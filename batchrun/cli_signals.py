"""SIGTERM and SIGINT while a job runs: first drain, then save and leave at once, then leave wherever the program is.

However many come, the process ends by its exit code: on its way out it hears none.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from batchrun.stop import AT_ONCE, SAID, StopRequest

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class _LeaveNow(KeyboardInterrupt):
    """Raised by a signal wherever the program is.

    Not KeyboardInterrupt itself: of that one the interpreter remembers that it passed through an exec() of text, as
    imports do, and ends by the signal though it was caught.
    """


@contextmanager
def stopping_on_signals(stop: StopRequest) -> Iterator[None]:
    """Within the block the signals raise `stop`; the handlers of before come back unless one did.

    Raises:
        StoppedEarly, StoppedByUser: a third signal came before the second had its effect.
    """

    num_signals = 0

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal num_signals
        num_signals += 1
        # Not the level, which a deadline raises too.
        if num_signals > AT_ONCE:
            _ignore_signals()
            raise _LeaveNow
        # A handler may have interrupted a write to sys.stderr, which cannot be entered twice.
        os.write(2, SAID[stop.request(signal.Signals(number).name)])

    before = {number: signal.getsignal(number) for number in _SIGNALS}
    for number in _SIGNALS:
        signal.signal(number, ask)
    try:
        yield
    except KeyboardInterrupt:
        if not stop.level:
            raise
        raise stop.error("what was committed is kept") from None
    finally:
        if stop.level:
            _ignore_signals()
        else:
            for number, handler in before.items():
                signal.signal(number, handler)


def interrupt_once(number: int, frame: FrameType | None) -> None:
    """The program's own handler of SIGINT, outside of jobs: one ends it, those that follow do not disturb its end."""
    _ignore_signals()
    raise _LeaveNow


def _ignore_signals() -> None:
    for number in _SIGNALS:
        # Not a handler of ours: the interpreter takes those away before its last callbacks have run.
        signal.signal(number, signal.SIG_IGN)
