"""A worker in a process of its own: loads the model, runs what it is leased, hands in what comes of it.

Knows nothing of the job folder, nor of how messages travel; see `Channel`.
"""

import logging
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from queue import SimpleQueue
from typing import Protocol, TextIO

import pyarrow as pa

from batchrun import __version__
from batchrun.checkpoint import cache_folder
from batchrun.errors import BatchrunError, ModelUnavailable, UsageError
from batchrun.executors import local
from batchrun.executors.messages import (
    Answered,
    Brief,
    Ended,
    FromWorker,
    Lease,
    Over,
    Ready,
    Said,
    Stop,
    Stuck,
    ToWorker,
    Unfinished,
    Wants,
    Working,
    packed,
    unpacked,
)
from batchrun.observe.log import LOGGER
from batchrun.opened import find_model, tokenizer_of
from batchrun.pending import LeasedRow, leased_rows
from batchrun.stop import StopRequest
from batchrun.store.counts import Counts
from batchrun.tally import EngineReport, Tally
from batchrun.tasks.task import make_task
from batchrun.tune.profile import as_tuned, find
from batchrun.worker import Pace, Worker

# How often answers and tokens are handed in; what is not is lost with the worker.
_HAND_IN_EVERY_S = 2.0
# The driver ends a stuck worker as soon as it hears of it.
_PATIENCE_S = 20.0


class Channel(Protocol):
    """A worker's line to the driver; any thread may send."""

    def send(self, message: FromWorker) -> None: ...

    def receive(self) -> ToWorker:
        """Waits for the next message. Raises EOFError when the driver is gone."""
        ...


def work(brief: Brief, channel: Channel, on_driver_gone: Callable[[], None]) -> None:
    """Works until there is nothing more to do, or somebody wants to stop; the last message says how it ended.

    `on_driver_gone` is called from another thread, and does not return.
    """
    root, handler = logging.getLogger(), _Telling(channel)
    root.addHandler(handler)
    LOGGER.setLevel(brief.log_level)
    try:
        _run(brief, channel, on_driver_gone)
    except BatchrunError as error:
        channel.send(Ended(error))
    else:
        channel.send(Ended())
    finally:
        root.removeHandler(handler)


def _run(brief: Brief, channel: Channel, on_driver_gone: Callable[[], None]) -> None:
    stop = StopRequest()
    rows = Leased(channel, stop, on_driver_gone)
    if brief.version != __version__:
        raise UsageError(f"a worker has batchrun {__version__}, but the job runs under {brief.version}: install that")
    job = brief.job
    checkpoint = find_model(job)
    if checkpoint.spec.digest != brief.digest:
        raise ModelUnavailable(f"a worker finds another {checkpoint.spec.name}: the same files should be on every node")
    job = as_tuned(job, find(cache_folder(), job, checkpoint.spec))
    tokenizer = tokenizer_of(job, checkpoint)
    place = local.Place(brief.device_index, brief.num_sharing)
    with closing(local.load(job, checkpoint, tokenizer, brief.plan, place)) as loaded:
        task = make_task(job, tokenizer, checkpoint.spec, shares_prefixes=loaded.began.shares_prefixes)
        tally = Tally(job, brief.plan, Counts(), abort_after=None)
        hand_in_every_s = min(job.checkpoint_every, _HAND_IN_EVERY_S)
        pace = Pace(hand_in_every_s, job.drain_timeout, job.step_timeout)
        worker = Worker(loaded.engine, task, Courier(channel), tally, stop, pace)
        channel.send(Ready(loaded.began))
        worker.run(rows)


class Leased:
    """The rows that the driver leases; a thread listens to it."""

    def __init__(self, channel: Channel, stop: StopRequest, on_driver_gone: Callable[[], None]) -> None:
        self._channel = channel
        self._stop = stop
        self._on_driver_gone = on_driver_gone
        self._inbox: SimpleQueue[ToWorker] = SimpleQueue()
        self._rows: deque[LeasedRow] = deque()
        self._has_asked = False
        self.num_ahead = 1
        self.is_over = False
        threading.Thread(target=self._listen, name="driver", daemon=True).start()

    def next(self) -> LeasedRow | None:
        """The next row; asks for more when it is the last."""
        while not self._inbox.empty():
            self._take(self._inbox.get())
        following = self._rows.popleft() if self._rows else None
        if not self._rows and not self._has_asked and not self.is_over:
            self._has_asked = True
            self._channel.send(Wants())
        return following

    def wait(self) -> None:
        """Until the driver has something to say."""
        self._take(self._inbox.get())

    def _take(self, message: ToWorker) -> None:
        match message:
            case Lease():
                self._has_asked, self.num_ahead = False, message.num_ahead
                for leased in message.units:
                    rows = unpacked(leased.rows)
                    self._rows.extend(leased_rows(leased.unit, rows, message.output_ids, message.num_given_up))
            case Over():
                self.is_over = True

    def _listen(self) -> None:
        while True:
            try:
                message = self._channel.receive()
            except EOFError:
                return self._on_driver_gone()
            if isinstance(message, Stop):
                # At once, in the middle of a step; the level only rises.
                self._stop.level = max(self._stop.level, message.level)
            self._inbox.put(message)


class Courier:
    """Hands in to the driver what a worker has."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def commit(self, unit: int, rows: Sequence[int], table: pa.Table) -> None:
        self._channel.send(Answered(unit, tuple(rows), packed(table)))

    def save_unfinished(self, rows: Mapping[int, tuple[int, ...]]) -> None:
        self._channel.send(Unfinished(dict(rows)))

    def suspect(self, rows: Iterable[int]) -> None:
        """The error that the worker ends with says so."""

    def give_up(self, rows: Sequence[int], timeout_s: float, dump: Callable[[TextIO], None]) -> None:
        with tempfile.TemporaryFile("w+") as file:
            dump(file)
            file.seek(0)
            self._channel.send(Stuck(tuple(rows), timeout_s, file.read()))
        time.sleep(_PATIENCE_S)

    def show(self, engine: EngineReport) -> None:
        self._channel.send(Working(engine))


class _Telling(logging.Handler):
    """Has the driver say what this process logs."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel
        self.setFormatter(logging.Formatter("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self._channel.send(Said(record.levelno, self.format(record)))
