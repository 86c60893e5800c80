"""Steps for attention: random queries, keys and values behind tables of shuffled blocks, NaN everywhere else."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from batchrun_kernels import Attention, KVLayer, KVPool, Mask, Work

# (q_len, kv_len): decode rows, a whole prompt, a later chunk, a chunk of one row more than a tile of the explicit path.
ITEMS = ((1, 1), (1, 63), (7, 7), (5, 38), (1, 111), (129, 140))
HEADS, KV_HEADS, HEAD_DIM, BLOCK = 6, 2, 8, 4
SINKS = torch.linspace(-2.0, 3.0, HEADS)
MASKS = {
    "plain": Mask(0.35),
    "window": Mask(0.35, window=9),
    "softcap": Mask(0.35, softcap=1.5),
    "sinks": Mask(0.35, sinks=SINKS),
    "all": Mask(0.35, window=13, softcap=1.5, sinks=SINKS),
}


@dataclass(frozen=True, slots=True)
class Step:
    """Keys and values lie slot after slot; every slot that no item covers is NaN, in the tables' last blocks too."""

    q: Tensor  # [num_tokens, num_heads, key_dim]
    keys: Tensor  # [num_blocks, block_size, kv_heads, key_dim]
    values: Tensor  # [num_blocks, block_size, kv_heads, value_dim]
    work: Work


def make_step(
    items: tuple[tuple[int, int], ...] = ITEMS,
    *,
    seed: int = 0,
    heads: int = HEADS,
    kv_heads: int = KV_HEADS,
    key_dim: int = HEAD_DIM,
    value_dim: int = HEAD_DIM,
    block: int = BLOCK,
) -> Step:
    random = torch.Generator().manual_seed(seed)
    num_blocks = [math.ceil(kv_len / block) for _, kv_len in items]
    shuffled = torch.randperm(sum(num_blocks) + 5, generator=random, dtype=torch.int32)
    table = torch.zeros(len(items), max(num_blocks), dtype=torch.int32)
    keys = torch.full((len(shuffled), block, kv_heads, key_dim), math.nan)
    values = torch.full((len(shuffled), block, kv_heads, value_dim), math.nan)
    taken = 0
    for item, ((_, kv_len), wanted) in enumerate(zip(items, num_blocks, strict=True)):
        table[item, :wanted] = shuffled[taken : taken + wanted]
        taken += wanted
        for position in range(kv_len):
            slot = int(table[item, position // block]), position % block
            keys[slot] = torch.randn(kv_heads, key_dim, generator=random)
            values[slot] = torch.randn(kv_heads, value_dim, generator=random)
    q = torch.randn(sum(q_len for q_len, _ in items), heads, key_dim, generator=random)
    work = Work(tuple(q_len for q_len, _ in items), tuple(kv_len for _, kv_len in items), table, block)
    return Step(q, keys, values, work)


def cast(step: Step, dtype: torch.dtype) -> Step:
    return replace(step, q=step.q.to(dtype), keys=step.keys.to(dtype), values=step.values.to(dtype))


def lay_out(attention: Attention, step: Step) -> KVPool:
    """The step's keys and values as the attention wants them, written by it into a pool of NaN."""
    num_blocks, block, kv_heads, key_dim = step.keys.shape
    layer = KVLayer(kv_heads, key_dim, step.values.shape[3])
    pool = attention.layout.allocate(num_blocks, block, layer, step.keys)
    for tensor in (pool.keys, pool.values):
        # What an allocation has behind its end is poisoned too.
        tensor.as_strided((tensor.untyped_storage().nbytes() // 4,), (1,)).fill_(math.nan)
    covered = (~step.keys.isnan().any(-1).any(-1)).flatten().nonzero().flatten()
    attention.layout.write(pool, step.keys.flatten(0, 1)[covered], step.values.flatten(0, 1)[covered], covered)
    return pool


def attend(attention: Attention, step: Step, mask: Mask) -> Tensor:
    """[num_tokens, num_heads, value_dim]; float32 pools only are laid out anew."""
    pool = lay_out(attention, step) if step.keys.dtype == torch.float32 else KVPool(step.keys, step.values)
    return attention.attend(step.q, pool.keys, pool.values, attention.plan(step.work), mask)
