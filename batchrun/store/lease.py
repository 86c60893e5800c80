"""The lock of a job folder: held for as long as its holder gives signs of life, on local and on shared disks.

A marker file that its holder touches every ten seconds. That of a dead process of this machine is taken at once, that
of a holder that went silent (another machine's, or a paused process) after `LEASE_S`, measured on the waiting one's
own clock. So a paused holder may be overtaken and wake up: `check` tells it, and the rules of the parts make sure
that it does no harm if it asks too late.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from filelock import SoftFileLease, Timeout

from batchrun.errors import StoppedEarly
from batchrun.store.layout import LEASE_S, Layout

# A holder that is just leaving must not turn a starting job away.
_LEAST_WAIT_S = 0.25
_SIGNING_S = 2.5


class Overtaken(StoppedEarly):
    """Another process has taken the job over while this one gave no sign of life: this one stops and writes nothing."""

    def __init__(self, name: str, who: Mapping[str, Any]) -> None:
        """`name` is the job's OUT; `who` has the `pid` and `host` of whoever took it over, or nothing."""
        holder = f" by process {who['pid']} on host {who['host']}" if {"pid", "host"} <= who.keys() else ""
        super().__init__(
            f"{name} was taken over{holder} while this process gave no sign of life; it stops, and nothing is lost: "
            "the same command goes on"
        )


class Lease:
    """One process's hold of the job folder `at`."""

    def __init__(self, at: Layout) -> None:
        self._at = at
        # The token is the process's, not a thread's.
        self._lock = SoftFileLease(at.lock, lease_duration=LEASE_S, thread_local=False)
        self._identity: tuple[int, int] | None = None

    def acquire(self, wait_s: float) -> None:
        """Takes the lock within `wait_s`; waits longer only where the holder seems gone, to see whether it is.

        Raises:
            StoppedEarly: somebody else has it; the message names who.
            OSError: the marker cannot be written.
        """
        if not (
            self._takes(max(wait_s, _LEAST_WAIT_S))
            or (not self._at.shows_life and self._takes(LEASE_S + _LEAST_WAIT_S))
            or (self._is_unsigned and self._takes_unsigned())
        ):
            raise StoppedEarly(self._held_message())
        self._identity = self._marker

    def check(self) -> None:
        """Raises Overtaken unless the lock is this process's still."""
        if self._marker is None or self._marker != self._identity:
            raise Overtaken(str(self._at.out), self._at.read_holder())

    @property
    def is_held(self) -> bool:
        """Whether the lock is this process's."""
        return self._identity is not None and self._marker == self._identity

    def release(self) -> None:
        """Lets go; leaves the lock alone when it is somebody else's by now."""
        self._identity = None
        self._lock.release()

    def _takes(self, within_s: float) -> bool:
        try:
            self._lock.acquire(timeout=within_s)
        except Timeout:
            return False
        return True

    @property
    def _marker(self) -> tuple[int, int] | None:
        """Which file the marker is; None when there is none."""
        with suppress(OSError):
            found = self._at.lock.stat()
            return found.st_dev, found.st_ino
        return None

    @property
    def _is_unsigned(self) -> bool:
        return self._marker is not None and self._lock.owner is None

    def _takes_unsigned(self) -> bool:
        """A marker that names nobody is one whose holder died while it signed, or whose content a power cut took."""
        before = self._marker
        if self._takes(_SIGNING_S):
            return True
        if self._is_unsigned and self._marker == before:
            self._lock.break_lock()
        return self._takes(_LEAST_WAIT_S)

    def _held_message(self) -> str:
        holder = self._at.read_holder()
        who = f"process {holder['pid']} on host {holder['host']}" if holder else "another process"
        remedy = "wait until it is done, or stop it with batchrun cancel; submit waits with --wait-lock"
        return f"{self._at.out} is held by {who}; {remedy}"
