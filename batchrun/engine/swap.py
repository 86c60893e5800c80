"""Blocks on the host: where preempted sequences' keys and values wait.

Owns the host's memory and the staging between it and the pool. Which block goes to which host slot is the scheduler's
business. Blocks are gathered into staging, or scattered from it, by the compute queue, which is quick; the slow way
between staging and host is the copy queue's, beside the next steps:

    out   compute: pool -> staging | copies: staging -> host
    in    copies: host -> staging  | compute: staging -> pool
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import numpy as np
import torch
from torch import Tensor

from batchrun.engine.host_memory import mapped
from batchrun.engine.kv_cache import KVCache
from batchrun.engine.queues import Event, Queues, to_device

_STAGED_BYTES = 64 << 20  # each of the two stagings


@dataclass(frozen=True, slots=True)
class Moved:
    """What swaps cost."""

    num_bytes: int
    seconds: float


@dataclass(slots=True)
class _Staging:
    """Room for some blocks on the device, and the last use that each queue made of it."""

    room: Tensor  # [num_blocks, elements of a block]
    copied: Event | None = None
    computed: Event | None = None


@dataclass(frozen=True, slots=True)
class _Timed:
    began: Event
    ended: Event
    num_bytes: int


class HostPool:
    """`num_slots` block-sized places on the host, page-locked when the cache is on a GPU.

    Calls return at once. Afterwards blocks may be used by whatever the compute queue is given next, and host slots by
    further calls. With a `descriptor` of memory the places are in it, for another process as well, and not page-locked.
    """

    def __init__(
        self,
        cache: KVCache,
        num_slots: int,
        queues: Queues,
        staged_bytes: int = _STAGED_BYTES,
        descriptor: int | None = None,
    ) -> None:
        self.num_slots = num_slots
        self._compute, self._copies = queues.compute, queues.copies
        # [num_blocks, elements] each: a block's rows in all of them, side by side, are a row of the host.
        self._pools = [tensor.flatten(1) for pool in cache.pools.values() for tensor in (pool.keys, pool.values)]
        place, width = self._pools[0], sum(pool.shape[1] for pool in self._pools)
        self._block_bytes = width * place.element_size()
        if descriptor is None or not num_slots:
            self._host = torch.empty(num_slots, width, dtype=place.dtype, pin_memory=place.is_cuda)
        else:
            memory = mapped(descriptor, num_slots * self._block_bytes)
            self._host = torch.frombuffer(memory, dtype=place.dtype).view(num_slots, width)
        self._num_staged = max(1, min(num_slots, staged_bytes // self._block_bytes))
        self._stagings = cycle([_Staging(place.new_empty(self._num_staged, width)) for _ in range(2)])
        self._timed: deque[_Timed] = deque()

    def copy_out(self, blocks: tuple[int, ...], host_slots: tuple[int, ...]) -> None:
        """What the blocks hold now is what the slots will hold."""
        for staging, some_blocks, some_slots in self._parts(blocks, host_slots):
            if staging.copied is not None:
                self._compute.wait_for(staging.copied)
            self._compute.run(partial(self._gather, some_blocks, staging.room))
            staging.computed = self._compute.record()
            self._copies.wait_for(staging.computed)
            began = self._copies.record()
            self._copies.run(partial(self._to_host, staging.room, some_slots))
            staging.copied = self._copies.record()
            self._timed.append(_Timed(began, staging.copied, len(some_slots) * self._block_bytes))

    def copy_in(self, host_slots: tuple[int, ...], blocks: tuple[int, ...]) -> None:
        """What the slots hold after all calls before is what the blocks will hold."""
        for staging, some_blocks, some_slots in self._parts(blocks, host_slots):
            if staging.computed is not None:
                self._copies.wait_for(staging.computed)
            began = self._copies.record()
            self._copies.run(partial(self._from_host, some_slots, staging.room))
            staging.copied = self._copies.record()
            self._compute.wait_for(staging.copied)
            self._compute.run(partial(self._scatter, staging.room, some_blocks))
            staging.computed = self._compute.record()
            self._timed.append(_Timed(began, staging.copied, len(some_slots) * self._block_bytes))

    def wait(self) -> None:
        """Returns when all copies are done."""
        self._copies.record().wait()

    def take_costs(self) -> Moved:
        """Of the copies that have ended since the last call."""
        num_bytes, seconds = 0, 0.0
        while self._timed and self._timed[0].ended.is_over():
            one = self._timed.popleft()
            num_bytes, seconds = num_bytes + one.num_bytes, seconds + one.began.seconds_until(one.ended)
        return Moved(num_bytes, seconds)

    def _parts(
        self, blocks: tuple[int, ...], host_slots: tuple[int, ...]
    ) -> Iterator[tuple[_Staging, tuple[int, ...], tuple[int, ...]]]:
        """As many blocks at a time as fit a staging."""
        assert len(blocks) == len(host_slots), f"{len(blocks)} blocks for {len(host_slots)} host slots"
        for first in range(0, len(blocks), self._num_staged):
            part = slice(first, first + self._num_staged)
            yield next(self._stagings), blocks[part], host_slots[part]

    def _gather(self, blocks: tuple[int, ...], room: Tensor) -> None:
        ids, begin = self._ids(blocks), 0
        for pool in self._pools:
            room[: len(blocks), begin : begin + pool.shape[1]] = pool[ids]
            begin += pool.shape[1]

    def _scatter(self, room: Tensor, blocks: tuple[int, ...]) -> None:
        ids, begin = self._ids(blocks), 0
        for pool in self._pools:
            pool[ids] = room[: len(blocks), begin : begin + pool.shape[1]]
            begin += pool.shape[1]

    def _to_host(self, room: Tensor, host_slots: tuple[int, ...]) -> None:
        for at, slots in _runs(host_slots):
            self._host[slots].copy_(room[at], non_blocking=True)

    def _from_host(self, host_slots: tuple[int, ...], room: Tensor) -> None:
        for at, slots in _runs(host_slots):
            room[at].copy_(self._host[slots], non_blocking=True)

    def _ids(self, blocks: tuple[int, ...]) -> Tensor:
        return to_device(np.array(blocks, np.int64), self._pools[0].device)


def _runs(host_slots: tuple[int, ...]) -> Iterator[tuple[slice, slice]]:
    """Places in the tuple, and slots, of neighbours: each pair is one copy."""
    begin = 0
    for end in range(1, len(host_slots) + 1):
        if end == len(host_slots) or host_slots[end] != host_slots[end - 1] + 1:
            yield slice(begin, end), slice(host_slots[begin], host_slots[end - 1] + 1)
            begin = end
