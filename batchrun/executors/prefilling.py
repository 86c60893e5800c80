"""A process that computes prompts for the engine of the process that started it, and ends when that does.

It has no rows of its own and no answers: see `engine.prefill_engine`. `prefill_process` starts it.
"""

import logging
import os
import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread
from typing import Any, NoReturn

from batchrun.engine.prefill_engine import PrefillEngine
from batchrun.errors import BatchrunError, EngineFailed
from batchrun.executors.local import Place, build_runner, configure
from batchrun.executors.prefill_process import Brief, Ready


def main() -> NoReturn:
    """The process's one argument is the number of an open connection to the engine that decodes."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they are for the other process, which ends this one
        signal.signal(number, signal.SIG_IGN)
    logging.disable()  # the other process says the same
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    received: SimpleQueue[Any] = SimpleQueue()
    Thread(target=_receive, args=(connection, received), daemon=True).start()
    try:
        _serve(connection, received)
    except BatchrunError as error:
        said: BatchrunError = error
    except Exception as error:
        said = EngineFailed(f"{type(error).__name__}: {error}")
    with suppress(BrokenPipeError, ConnectionResetError):
        connection.send(said)
    os._exit(1)


def _receive(connection: "Connection[Any, Any]", received: "SimpleQueue[Any]") -> None:
    """Ends the process when the other one does, even in the middle of a step."""
    try:
        while True:
            received.put(connection.recv())
    finally:
        os._exit(0)


def _serve(connection: "Connection[Any, Any]", received: "SimpleQueue[Any]") -> NoReturn:
    brief: Brief = received.get()
    place = Place(device_index=1, num_sharing=2, swap_descriptor=brief.swap_descriptor)
    runner = build_runner(brief.job, brief.checkpoint, place)
    os.close(brief.swap_descriptor)
    eos_token_ids = brief.checkpoint.spec.eos_token_ids
    config = configure(brief.job, runner, eos_token_ids, shares_prefixes=brief.shares_prefixes)
    engine = PrefillEngine(config, runner)
    connection.send(Ready(engine.capacity, runner.block_format))
    while True:
        while not engine.has_work or not received.empty():
            for prefill in received.get():
                engine.add(prefill)
        connection.send(engine.step())


if __name__ == "__main__":
    main()
