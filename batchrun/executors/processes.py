"""Workers that are processes of this machine, each at the other end of a pair of sockets.

As a program it is such a process: it ends when its driver does. Knows nothing of what is said.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait

from batchrun.child import same_modules
from batchrun.cores import num_threads
from batchrun.errors import EngineFailed
from batchrun.executors import member
from batchrun.executors.messages import Brief, FromWorker, Lost, ToWorker

# By these somebody else ends a process, or the system where memory is short; it has no part in it.
_FROM_OUTSIDE = {-signal.SIGKILL, -signal.SIGTERM}


@dataclass(frozen=True, slots=True)
class _Process:
    """A worker; its `slot` says which GPU it has."""

    process: subprocess.Popen[bytes]
    line: Connection
    slot: int


class LocalProcesses:
    """A fleet of at most `num_workers` processes at a time, among which the machine's cores are divided."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._processes: dict[int, _Process] = {}

    def start(self, worker: int, brief: Brief) -> None:
        slot = min({*range(self._num_workers)} - {each.slot for each in self._processes.values()})
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                # Not from whatever is in the current folder, but from where this process has its modules.
                [sys.executable, "-P", "-m", __name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=os.environ | self._environment(),
                stdin=subprocess.DEVNULL,
                # What libraries print is no result.
                stdout=2,
                # Ctrl-C is for the driver, which stops its workers; they end when it does.
                process_group=0,
            )
        line = Connection(ours.detach())
        self._processes[worker] = _Process(process, line, slot)
        self._say(line, replace(brief, device_index=slot, num_sharing=self._num_workers))

    def send(self, worker: int, message: ToWorker) -> None:
        self._say(self._processes[worker].line, message)

    def receive(self, timeout_s: float) -> list[tuple[int, FromWorker | Lost]]:
        workers = {each.line: worker for worker, each in self._processes.items()}
        ready = [line for line in wait([*workers], timeout_s) if isinstance(line, Connection)]
        return [(workers[line], message) for line in ready for message in self._heard(workers[line])]

    def end(self, worker: int) -> None:
        each = self._processes.pop(worker, None)
        if each is not None:
            each.process.kill()
            each.process.wait()
            each.line.close()

    def _say(self, line: Connection, message: Brief | ToWorker) -> None:
        # Of one that is gone, what it said last is still to be read.
        with suppress(BrokenPipeError, ConnectionResetError):
            line.send(message)

    def _heard(self, worker: int) -> Iterator[FromWorker | Lost]:
        """What a worker has said by now, at least one message."""
        each = self._processes[worker]
        try:
            yield each.line.recv()
            while each.line.poll():
                yield each.line.recv()
        except (EOFError, OSError):  # at the end of a message, or in the middle of one
            code = each.process.wait()
            self.end(worker)
            yield Lost(_named(code), has_crashed=code not in _FROM_OUTSIDE)

    def _environment(self) -> dict[str, str]:
        return {
            **same_modules(),
            "OMP_NUM_THREADS": str(max(1, num_threads() // self._num_workers)),
        }


def _named(code: int) -> str:
    """How a process ended."""
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


class _Line:
    """A `member.Channel` over a socket."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, message: FromWorker) -> None:
        with self._lock:
            self._connection.send(message)

    def receive(self) -> ToWorker:
        try:
            message: ToWorker = self._connection.recv()
        except OSError as error:
            raise EOFError from error
        return message


def main(descriptor: int) -> None:
    """Works for the driver at the other end of a socket."""
    # To all processes of a job, as some schedulers send it: it is the driver that stops its workers.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    connection = Connection(descriptor)
    try:
        brief: Brief = connection.recv()
        member.work(brief, _Line(connection), on_driver_gone=lambda: os._exit(EngineFailed.exit_code))
    except (EOFError, OSError):
        # Nobody is there any more to be told anything.
        os._exit(EngineFailed.exit_code)


if __name__ == "__main__":
    main(int(sys.argv[1]))
