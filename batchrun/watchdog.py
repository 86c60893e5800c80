"""A thread that notices when a step does not end.

Time is counted in ticks of its own, so that a process that was paused as a whole is not taken for a stuck one.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

_TICKS = 20
_LONGEST_TICK_S = 5.0


class Watchdog:
    """Calls `on_stuck`, from its thread, when a step has lasted for `timeout_s` seconds; 0: never."""

    def __init__(self, timeout_s: float, on_stuck: Callable[[], None]) -> None:
        self._timeout_s = timeout_s
        self._on_stuck = on_stuck
        self._over = Event()
        self._num_steps = 0
        self._is_inside = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within the block steps are watched."""
        thread = Thread(target=self._watch, name="watchdog", daemon=True)
        if self._timeout_s:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            if self._timeout_s:
                thread.join()

    @contextmanager
    def step(self) -> Iterator[None]:
        """The block is one step."""
        self._num_steps += 1
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = False

    def _watch(self) -> None:
        tick = min(self._timeout_s / _TICKS, _LONGEST_TICK_S)
        seen, lasted = 0, 0.0
        while not self._over.wait(tick):
            lasted = lasted + tick if self._is_inside and self._num_steps == seen else 0.0
            seen = self._num_steps
            if lasted >= self._timeout_s:
                self._on_stuck()
                return
