"""Ctrl-C, or the interrupt of a notebook's kernel, while Python waits for a job: first drain, then save at once.

For a program that goes on afterwards: the handler of before comes back. The command's own signals are the command's.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from batchrun.stop import AT_ONCE, SAID, StopRequest


@contextmanager
def draining_on_interrupt(stop: StopRequest) -> Iterator[None]:
    """Within the block SIGINT raises `stop` twice, and is then a KeyboardInterrupt.

    Only the main thread can hear signals; in any other nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    num_signals = 0

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal num_signals
        num_signals += 1
        # Not the level, which a deadline raises too.
        if num_signals > AT_ONCE:
            raise KeyboardInterrupt
        os.write(2, SAID[stop.request("SIGINT")])

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield
    finally:
        # None: whoever set it was not Python, and Python cannot set it again.
        signal.signal(signal.SIGINT, signal.default_int_handler if before is None else before)
