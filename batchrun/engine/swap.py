"""Blocks on the host: where preempted sequences' keys and values wait.

Owns the host tensors. Which block goes to which host slot is the scheduler's business.
"""

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from batchrun.engine.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class Moved:
    """What a swap cost."""

    num_bytes: int
    seconds: float


class HostPool:
    """`num_slots` block-sized places on the host for every layer; page-locked when the cache is on a GPU."""

    def __init__(self, cache: KVCache, num_slots: int) -> None:
        self.num_slots = num_slots
        self._pairs: list[tuple[Tensor, Tensor]] = []  # (on the device, on the host), both [blocks or slots, ...]
        for pool in cache.pools.values():
            for tensor in (pool.keys, pool.values):
                host = torch.empty(num_slots, *tensor.shape[1:], dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                self._pairs.append((tensor, host))

    def copy_out(self, blocks: tuple[int, ...], host_slots: tuple[int, ...]) -> Moved:
        """Returns when the blocks may be overwritten."""
        return self._copy(blocks, host_slots, out=True)

    def copy_in(self, host_slots: tuple[int, ...], blocks: tuple[int, ...]) -> Moved:
        """Returns when the blocks may be read and the host slots overwritten."""
        return self._copy(blocks, host_slots, out=False)

    def _copy(self, blocks: tuple[int, ...], host_slots: tuple[int, ...], *, out: bool) -> Moved:
        assert len(blocks) == len(host_slots), f"{len(blocks)} blocks for {len(host_slots)} host slots"
        started = time.perf_counter()
        on_host = torch.tensor(host_slots, dtype=torch.int64)
        num_bytes = 0
        for pool, host in self._pairs:
            on_device = torch.tensor(blocks, dtype=torch.int64, device=pool.device)
            if out:
                host[on_host] = pool[on_device].cpu()
            else:
                pool[on_device] = host[on_host].to(pool.device)
            num_bytes += len(blocks) * host[0].numel() * host.element_size()
        if self._pairs and self._pairs[0][0].is_cuda:
            torch.cuda.synchronize(self._pairs[0][0].device)
        return Moved(num_bytes, time.perf_counter() - started)
