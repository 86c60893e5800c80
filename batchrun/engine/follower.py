"""A rank above 0, a process of its own: computes with its shard what rank 0 says, and ends when rank 0 does.

It has no scheduler, no prefix tree and no rows: which tokens go to which blocks is in the orders. `ranks` starts it.
"""

import logging
import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread
from typing import Any, NoReturn

import torch

from batchrun.engine.group import Group
from batchrun.engine.orders import Failed, Head, Hidden, Logits, Order, Ready, Start
from batchrun.engine.shard import Shard
from batchrun.engine.step import SwapIn, SwapOut


def main() -> NoReturn:
    """The process's one argument is the number of an open connection to rank 0."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they are for rank 0, which ends this process
        signal.signal(number, signal.SIG_IGN)
    logging.disable()  # rank 0 says the same
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    connection.send(Ready())
    received: SimpleQueue[Any] = SimpleQueue()
    Thread(target=_receive, args=(connection, received), daemon=True).start()
    try:
        _follow(received)
    except Exception as error:
        failed_at = time.monotonic()
        lines = str(error).strip().splitlines()
        connection.send(Failed(lines[0] if lines else type(error).__name__, failed_at))
        # Whatever else still computes here waits for ranks that will not come.
        os._exit(1)


def _receive(connection: "Connection[Any, Any]", received: "SimpleQueue[Any]") -> None:
    """Ends the process when rank 0 ends, even in the middle of a step."""
    while True:
        try:
            received.put(connection.recv())
        except (EOFError, OSError):
            os._exit(0)


@torch.inference_mode()
def _follow(received: "SimpleQueue[Any]") -> NoReturn:
    start: Start = received.get()
    if start.num_threads is not None:
        torch.set_num_threads(start.num_threads)
    size = start.options.num_ranks
    store = Group.meeting_place(size, start.port)
    group = Group.join(store, start.rank, size, start.device_type)
    shard = Shard.load(start.checkpoint, start.options, group)
    while True:
        carry_out(received.get(), shard, group)


def carry_out(order: Order, shard: Shard, group: Group) -> None:
    """Does with `shard` what rank 0 does with its own at the same time."""
    match order:
        case SwapOut():
            shard.copy_out(order)
        case SwapIn():
            shard.copy_in(order)
        case Logits():
            shard.logits(order.step.on(group.device))
        case Hidden():
            shard.hidden(order.step.on(group.device))
        case Head():
            hidden = shard.model.place.new_empty(order.shape)
            group.share(hidden)
            shard.head(hidden)


if __name__ == "__main__":
    main()
