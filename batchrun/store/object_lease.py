"""The lock of a job on an object store: numbered objects, of which the last says who holds the job.

Whoever creates the next number has the job, and only one can. Its holder writes it anew every five seconds; one that
has not changed for `LEASE_S` on the waiting process's own clock is succeeded, as is at once one that was let go, or
whose process has ended on this machine. As with the lease on disks a holder may be overtaken and wake up; the rules of
the parts make sure that it does no harm.
"""

import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from batchrun.errors import StoppedEarly, StorageFailed
from batchrun.store.layout import LEASE_S
from batchrun.store.lease import Overtaken
from batchrun.store.objects import Object, Objects
from batchrun.store.status import is_gone

_NAME = re.compile(r"lock-(\d{8})")
_BEAT_EVERY_S = 5.0
_LOOK_EVERY_S = 0.5
_LEAST_WAIT_S = 0.25


@dataclass(frozen=True, slots=True)
class Term:
    """One process's hold of the job, as it was last written."""

    number: int
    object: Object
    holder: dict[str, Any]  # pid, host; released: let go

    @property
    def is_over(self) -> bool:
        return bool(self.holder.get("released")) or is_gone(self.holder)

    @property
    def shows_life(self) -> bool:
        """Whether it was written lately, by this machine's clock; only a hint, since clocks differ."""
        return not self.is_over and abs(time.time() - self.object.modified) <= LEASE_S


def last_term(objects: Objects) -> Term | None:
    """Who has, or had, the job last; None when nobody had. Raises StorageFailed."""
    numbers = _numbers(objects)
    if not numbers:
        return None
    found = numbers[max(numbers)]
    try:
        holder = json.loads(objects.get(found.key) or b"{}")
    except ValueError:
        holder = {}
    return Term(max(numbers), found, holder)


class ObjectLease:
    """One process's hold of the job `name`. `beat` is called with every sign of life, from a thread of its own."""

    def __init__(self, objects: Objects, name: str, beat: Callable[[], None]) -> None:
        self._objects = objects
        self._name = name
        self._beat = beat
        self._number: int | None = None
        self._is_overtaken = False
        self._let_go = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self, wait_s: float) -> None:
        """Takes the job within `wait_s`; waits longer only where the holder seems gone, to see whether it is.

        Raises:
            StoppedEarly: somebody else has it; the message names who.
            StorageFailed: the store failed.
        """
        began = seen_at = time.monotonic()
        seen, is_alive = None, False
        while not self._takes(term := last_term(self._objects), is_silent=time.monotonic() - seen_at >= LEASE_S):
            now, current = time.monotonic(), term and term.object.etag
            if current != seen:
                is_alive = is_alive or seen is not None
                seen, seen_at = current, now
            if term and now - began >= max(wait_s, _LEAST_WAIT_S) and (term.shows_life or is_alive):
                raise StoppedEarly(
                    f"{self._name} is held by {_who(term)}; wait until it is done, or stop it "
                    "with batchrun cancel; submit waits with --wait-lock"
                )
            time.sleep(_LOOK_EVERY_S)
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises Overtaken unless the job is this process's still, StorageFailed when that cannot be told."""
        if self._is_overtaken or max(_numbers(self._objects), default=0) != self._number:
            self._is_overtaken = True
            term = last_term(self._objects)
            raise Overtaken(self._name, term.holder if term else {})

    @property
    def is_held(self) -> bool:
        """Whether the job is this process's, as far as it knows."""
        return self._number is not None and not self._is_overtaken

    def release(self) -> None:
        """Lets go; the numbers before go with it."""
        if self._thread is not None:
            self._let_go.set()
            self._thread.join()
        if self._number is None or self._is_overtaken:
            return
        number, self._number = self._number, None
        with suppress(StorageFailed):
            numbers = _numbers(self._objects)
            if max(numbers, default=0) != number:
                return
            if self._objects.find().keys() == {each.key for each in numbers.values()}:
                # The job has come to nothing.
                self._objects.remove(each.key for each in numbers.values())
                return
            self._objects.put(_key(number), _said(released=True))
            self._objects.remove(each.key for other, each in numbers.items() if other < number)

    def _takes(self, term: Term | None, *, is_silent: bool) -> bool:
        if term is not None and not term.is_over and not is_silent:
            return False
        number = term.number + 1 if term else 1
        try:
            self._objects.create(_key(number), _said())
        except FileExistsError:
            return False
        self._number = number
        return True

    def _keep(self) -> None:
        """The signs of life; a store that does not answer is asked again at the next."""
        while not self._let_go.wait(_BEAT_EVERY_S):
            with suppress(StorageFailed, OSError):
                assert self._number is not None
                if max(_numbers(self._objects), default=0) != self._number:
                    self._is_overtaken = True
                    return
                self._objects.put(_key(self._number), _said())
                self._beat()


def _numbers(objects: Objects) -> dict[int, Object]:
    found = ((_NAME.fullmatch(key), each) for key, each in objects.find("lock-").items())
    return {int(match[1]): each for match, each in found if match}


def _key(number: int) -> str:
    return f"lock-{number:08d}"


def _said(*, released: bool = False) -> bytes:
    """The time makes every sign of life another object; nobody compares it with a clock."""
    who = {"pid": os.getpid(), "host": socket.gethostname(), "at": time.time_ns(), "released": released}
    return json.dumps(who).encode()


def _who(term: Term) -> str:
    known = {"pid", "host"} <= term.holder.keys()
    return f"process {term.holder['pid']} on host {term.holder['host']}" if known else "another process"
