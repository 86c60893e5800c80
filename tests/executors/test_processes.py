"""A process that is killed in the middle of a word is gone, to either side."""

import os
import socket
import struct
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection

from batchrun.executors.member import Leased
from batchrun.executors.messages import Lost
from batchrun.executors.processes import LocalProcesses, _Line, _Process
from batchrun.stop import StopRequest

# More than a socket holds.
TALKER = """
import sys
from multiprocessing.connection import Connection
Connection(int(sys.argv[1])).send(b"x" * 5_000_000)
"""


def test_a_worker_that_is_killed_while_it_speaks_is_lost() -> None:
    fleet = LocalProcesses(1)
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen([sys.executable, "-c", TALKER, str(theirs.fileno())], pass_fds=[theirs.fileno()])
    line = Connection(ours.detach())
    fleet._processes[0] = _Process(process, line, 0)
    assert line.poll(30)  # it has begun
    process.kill()
    assert fleet.receive(10) == [(0, Lost("ended by SIGKILL", has_crashed=False))]


def test_a_worker_whose_driver_is_killed_while_it_speaks_notices() -> None:
    ours, theirs = socket.socketpair()
    gone = threading.Event()
    rows = Leased(_Line(Connection(theirs.detach())), StopRequest(), gone.set)
    assert rows.next() is None
    with ours:
        Connection(os.dup(ours.fileno())).recv()  # that it wants some
        ours.sendall(struct.pack("!i", 300_000) + b"x" * 100_000)
        ours.shutdown(socket.SHUT_RDWR)
    assert gone.wait(10)


def test_a_worker_that_ends_before_it_is_told_what_to_do_is_lost(monkeypatch) -> None:
    """The brief may be larger than a socket holds."""
    monkeypatch.setattr("batchrun.executors.processes.__name__", "batchrun.no_such_module")
    fleet = LocalProcesses(1)

    class Brief:
        """As large as a template may be."""

        def __reduce__(self):
            time.sleep(1.0)
            return bytes, (b"x" * 5_000_000,)

    monkeypatch.setattr("batchrun.executors.processes.replace", lambda brief, **changes: brief)
    fleet.start(0, Brief())
    ((worker, message),) = fleet.receive(20)
    assert (worker, message.reason) == (0, "exit code 1")
