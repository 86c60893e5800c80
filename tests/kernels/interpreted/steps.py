"""Random steps for attention: shuffled, partly shared blocks in a pool that is NaN wherever nobody reads."""

import math
from dataclasses import dataclass, replace

import pytest
import torch

from batchrun_kernels import Work
from batchrun_kernels.triton.configs import architecture, has_float8
from tests.kernels.steps import Step


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads and sizes of a layer; no size is a power of two unless a test wants it."""

    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 24
    value_dim: int = 24
    block_size: int = 4


def make_step(
    lens: tuple[tuple[int, int], ...],  # (q_len, kv_len) of each sequence
    shape: Shape,
    *,
    shared: tuple[int, ...] = (),  # blocks each sequence but the first has in common with the one before it
    run_blocks: int = 1,  # a sequence's own blocks are consecutive between multiples of so many
    seed: int = 0,
) -> Step:
    random = torch.Generator().manual_seed(seed)
    size = shape.block_size
    num_blocks = [math.ceil(kv_len / size) for _, kv_len in lens]
    num_runs = sum(math.ceil(num / run_blocks) for num in num_blocks) + 5
    starts = iter((run_blocks * torch.randperm(num_runs, generator=random)).tolist())
    table = torch.full((len(lens), max(num_blocks)), -1, dtype=torch.int32)
    keys = torch.full((num_runs * run_blocks, size, shape.kv_heads, shape.head_dim), math.nan)
    values = torch.full((num_runs * run_blocks, size, shape.kv_heads, shape.value_dim), math.nan)
    for row, (_, kv_len) in enumerate(lens):
        kept = shared[row - 1] if row and shared else 0
        table[row, :kept] = table[row - 1, :kept]
        for at in range(kept, num_blocks[row]):
            if at == kept or at % run_blocks == 0:
                start = next(starts)
            block, filled = start + at % run_blocks, min(size, kv_len - at * size)
            table[row, at] = block
            keys[block, :filled] = torch.randn(filled, shape.kv_heads, shape.head_dim, generator=random)
            values[block, :filled] = torch.randn(filled, shape.kv_heads, shape.value_dim, generator=random)
    q = torch.randn(sum(q_len for q_len, _ in lens), shape.heads, shape.head_dim, generator=random)
    return Step(q, keys, values, Work(tuple(q for q, _ in lens), tuple(kv for _, kv in lens), table, size))


def scatter(step: Step, seed: int = 0) -> Step:
    """The same keys and values, in blocks that lie in another order."""
    random = torch.Generator().manual_seed(seed)
    places = torch.randperm(len(step.keys), generator=random)
    keys, values = torch.empty_like(step.keys), torch.empty_like(step.values)
    keys[places], values[places] = step.keys, step.values
    table = places[step.work.block_table.long()].to(torch.int32)
    return replace(step, keys=keys, values=values, work=replace(step.work, block_table=table))


def skip_without(dtype: torch.dtype, device: torch.device) -> None:
    """Skips a test of float8 on a GPU that has none; there it is refused by name."""
    if dtype == torch.float8_e4m3fn and not has_float8(architecture(device)):
        pytest.skip("needs a GPU with float8_e4m3fn")
