"""Blocks come back from the host as they left, whatever two queues do at the same time."""

import os
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from batchrun.engine.host_memory import anonymous
from batchrun.engine.kv_cache import KVCache
from batchrun.engine.queues import Queues, queues_of
from batchrun.engine.swap import HostPool
from batchrun_kernels import KVLayer
from batchrun_kernels.cpu import GatherAttention

NUM_BLOCKS, NUM_SLOTS, BLOCK = 12, 9, 2


@dataclass
class LazyEvent:
    is_past: bool = False

    def is_over(self) -> bool:
        return self.is_past

    def wait(self) -> None:
        raise AssertionError("nobody needs to wait for a swap on the host")

    def seconds_until(self, later: "LazyEvent") -> float:
        assert self.is_past
        assert later.is_past
        return 1.0


class LazyQueue:
    """Does nothing before `do_one`, and then only what no event holds back."""

    def __init__(self) -> None:
        self.entries: deque[Callable[[], bool]] = deque()

    def run(self, work: Callable[[], None]) -> None:
        self.entries.append(lambda: work() is None)

    def record(self) -> LazyEvent:
        event = LazyEvent()
        self.run(lambda: setattr(event, "is_past", True))
        return event

    def wait_for(self, event: LazyEvent) -> None:
        self.entries.append(event.is_over)

    def do_one(self) -> bool:
        """Whether anything was done."""
        if not self.entries or not self.entries[0]():
            return False
        self.entries.popleft()
        return True


def drain(queues: list[LazyQueue], rng: random.Random, at_most: int) -> None:
    for _ in range(at_most):
        first, second = rng.sample(queues, 2)
        if not (first.do_one() or second.do_one()):
            assert not any(queue.entries for queue in queues), "the queues wait for each other"
            return


def make_cache() -> KVCache:
    """Two layers of different shapes."""
    cache = KVCache(NUM_BLOCKS, BLOCK, GatherAttention(), torch.empty(0))
    cache.allocate(0, KVLayer(1, 3, 5))
    cache.allocate(1, KVLayer(2, 4, 4))
    return cache


def fill(cache: KVCache, block: int, value: float) -> None:
    for tensor in tensors(cache):
        tensor[block] = value + torch.arange(tensor[block].numel()).view(tensor[block].shape) / 1024


def tensors(cache: KVCache) -> list[Tensor]:
    return [tensor for pool in cache.pools.values() for tensor in (pool.keys, pool.values)]


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("staged_blocks", [1, 2, 5])
def test_every_order_that_events_allow_moves_the_same_blocks(seed: int, staged_blocks: int) -> None:
    """Random swaps and overwrites, against a plain dict; the queues go on at random, or all at the end."""
    rng = random.Random(seed)
    cache, compute, copies = make_cache(), LazyQueue(), LazyQueue()
    host = HostPool(cache, NUM_SLOTS, Queues(compute, copies), staged_blocks * cache.block_bytes)
    in_pool: dict[int, float] = {}
    on_host: dict[int, float] = {}
    value = 0.0
    moved = 0
    for _ in range(25):
        for block in rng.sample(range(NUM_BLOCKS), 3):
            value += 1
            in_pool[block] = value
            compute.run(lambda block=block, value=value: fill(cache, block, value))  # type: ignore[misc]
        num = rng.randint(1, 6)
        if rng.random() < 0.5 or len(on_host) < num:
            blocks, slots = rng.sample(sorted(in_pool), min(num, len(in_pool))), rng.sample(range(NUM_SLOTS), num)
            slots = slots[: len(blocks)]
            host.copy_out(tuple(blocks), tuple(slots))
            on_host |= {slot: in_pool[block] for block, slot in zip(blocks, slots, strict=True)}
        else:
            slots, blocks = rng.sample(sorted(on_host), num), rng.sample(range(NUM_BLOCKS), num)
            host.copy_in(tuple(slots), tuple(blocks))
            in_pool |= {block: on_host[slot] for block, slot in zip(blocks, slots, strict=True)}
        moved += len(blocks)
        if seed % 3:
            drain([compute, copies], rng, at_most=rng.randint(0, 12))
    drain([compute, copies], rng, at_most=10_000)
    costs = host.take_costs()
    assert costs.num_bytes == moved * cache.block_bytes
    assert costs.seconds > 0
    found = [tensor.clone() for tensor in tensors(cache)]
    for block, expected in in_pool.items():
        fill(cache, block, expected)
        assert all(torch.equal(old[block], new[block]) for old, new in zip(found, tensors(cache), strict=True))


def test_costs_are_told_once_and_only_of_copies_that_have_ended() -> None:
    cache, compute, copies = make_cache(), LazyQueue(), LazyQueue()
    host = HostPool(cache, NUM_SLOTS, Queues(compute, copies))
    host.copy_out((3, 1), (0, 7))
    assert host.take_costs().num_bytes == 0
    drain([compute, copies], random.Random(0), at_most=100)
    assert host.take_costs().num_bytes == 2 * cache.block_bytes
    assert host.take_costs().num_bytes == 0


def test_another_pool_finds_the_blocks_once_copies_were_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have their slots in the same memory; copies that nobody waits for may come at any time."""
    giving, taking, compute, copies = make_cache(), make_cache(), LazyQueue(), LazyQueue()
    rng = random.Random(3)

    def wait(event: LazyEvent) -> None:
        while not event.is_past:
            drain([compute, copies], rng, at_most=1)

    monkeypatch.setattr(LazyEvent, "wait", wait)
    descriptor = anonymous(NUM_SLOTS * giving.block_bytes)
    out = HostPool(giving, NUM_SLOTS, Queues(compute, copies), giving.block_bytes, descriptor)
    back = HostPool(taking, NUM_SLOTS, queues_of(torch.device("cpu")), descriptor=descriptor)
    os.close(descriptor)
    for block in (3, 1, 5):
        fill(giving, block, float(block))
    out.copy_out((3, 1, 5), (0, 7, 8))
    assert copies.entries
    out.wait()
    assert not copies.entries
    back.copy_in((8, 0, 7), (2, 0, 9))
    for tensor, source in zip(tensors(taking), tensors(giving), strict=True):
        assert torch.equal(tensor[[2, 0, 9]], source[[5, 3, 1]])
