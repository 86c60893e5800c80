"""Attention at a model's shapes: decode rows, chunks, and rows that share a prefix, with sharing and without."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from batchrun_kernels.contract import KVLayer, KVPool, Mask, Work
from batchrun_kernels.triton.attention import TritonAttention
from batchrun_kernels.triton.bench.workload import Checked, Load, Size, Trial, Workload, compared

# Rows of a workload that are compared with plain torch.
_NUM_CHECKED = 6


@dataclass(frozen=True, slots=True)
class _Lens:
    """Sequences whose first `shared` tokens are the same."""

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    shared: int = 0


def attention_workloads(size: Size, load: Load) -> Iterator[Workload]:
    contexts = np.random.default_rng(0).integers(*load.contexts, size=load.batch, endpoint=True).tolist()
    words = f"{load.batch} rows, context {load.contexts[0]}-{load.contexts[1]}"
    yield _workload("attend decode", words, _Lens((1,) * load.batch, tuple(contexts)), size)
    for behind in load.behind:
        lens = _Lens((load.chunk,), (behind + load.chunk,))
        yield _workload("attend chunk", f"{load.chunk} tokens behind {behind}", lens, size)
    for prefix in load.prefixes:
        lens = _Lens((1,) * load.batch, (prefix + load.suffix,) * load.batch, prefix)
        words = f"{load.batch} rows, {load.suffix} of their own behind {prefix} shared"
        for shares in (True, False):
            yield _workload("attend cascade" if shares else "attend flat", words, lens, size, shares_prefixes=shares)


def _workload(kernel: str, words: str, lens: _Lens, size: Size, *, shares_prefixes: bool = True) -> Workload:
    """A shared prefix counts once in the bytes, also where it is read for each row: caches may help there."""
    q_lens, kv_lens = np.array(lens.q_lens, np.int64), np.array(lens.kv_lens, np.int64)
    num_read = int((kv_lens - lens.shared).sum()) + lens.shared
    queries = 2 * int(q_lens.sum()) * size.heads * size.head_dim * size.dtype.itemsize
    num_visible = int((q_lens * (kv_lens - q_lens) + q_lens * (q_lens + 1) // 2).sum())
    return Workload(
        kernel,
        words,
        num_read * size.token_bytes + queries,
        4 * num_visible * size.heads * size.head_dim,
        lambda device: _prepare(lens, size, shares_prefixes, device),
    )


def _prepare(lens: _Lens, size: Size, shares_prefixes: bool, device: torch.device) -> Trial:
    attention = TritonAttention(device, shares_prefixes=shares_prefixes)
    work, num_blocks = _work(lens, size.block_size)
    place = torch.zeros((), dtype=size.dtype, device=device)
    pool = attention.layout.allocate(num_blocks, size.block_size, KVLayer(size.kv_heads, *[size.head_dim] * 2), place)
    pool.keys.normal_()
    pool.values.normal_()
    q = torch.randn(sum(lens.q_lens), size.heads, size.head_dim, dtype=size.dtype, device=device)
    mask = Mask(size.head_dim**-0.5)
    plan = attention.plan(work)

    def run() -> Tensor:
        return attention.attend(q, pool.keys, pool.values, plan, mask)

    def check() -> Checked:
        rows = np.unique(np.linspace(0, len(q) - 1, _NUM_CHECKED).astype(int)).tolist()
        exact = torch.stack([_exact(q[row], row, pool, work, mask) for row in rows])
        return compared(run()[rows], exact, size.tolerance)

    return Trial(run, check)


def _work(lens: _Lens, block_size: int) -> tuple[Work, int]:
    """The work, over shuffled blocks, and how many blocks there are."""
    kv_lens = np.array(lens.kv_lens)
    num_shared = lens.shared // block_size
    num_own = -(-kv_lens // block_size) - num_shared
    starts = num_shared + np.cumsum(num_own) - num_own
    num_blocks = int(num_shared + num_own.sum())
    column = np.arange(num_shared + int(num_own.max()))
    logical = np.where(column < num_shared, column, starts[:, None] + column - num_shared)
    shuffled = np.random.default_rng(1).permutation(num_blocks).astype(np.int32)
    table = shuffled[np.minimum(logical, num_blocks - 1)]
    return Work(lens.q_lens, lens.kv_lens, torch.from_numpy(table), block_size), num_blocks


def _exact(
    q: Tensor,  # [num_heads, head_dim]
    row: int,
    pool: KVPool,
    work: Work,
    mask: Mask,
) -> Tensor:
    """float32 [num_heads, value_dim]: one row, from a gathered copy of all that it sees."""
    starts = np.cumsum(work.q_lens) - np.array(work.q_lens)
    item = int(np.searchsorted(starts, row, side="right")) - 1
    num_seen = work.kv_lens[item] - work.q_lens[item] + row - int(starts[item]) + 1
    blocks = work.block_table[item, : -(-num_seen // work.block_size)].to(pool.keys.device, torch.int64)
    k, v = (one[blocks].transpose(0, 1).flatten(1, 2)[:, :num_seen].float() for one in (pool.keys, pool.values))
    grouped = q.float().view(len(k), -1, q.shape[1])  # [kv_heads, group, head_dim]
    return (torch.softmax(grouped @ k.mT * mask.scale, -1) @ v).flatten(0, 1)
