"""Random steps: a prefix tree, decode rows and chunks, a shape and a mask, over a pool of NaN where none may read."""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from batchrun_kernels import Mask, Work
from batchrun_kernels.pieces import Rules
from tests.kernels.steps import Step
from tests.kernels.worklists import random_rules, random_work


@dataclass(frozen=True, slots=True)
class RandomStep:
    step: Step  # float32
    mask: Mask
    rules: Rules


def random_step(seed: int, *, most_sequences: int = 6) -> RandomStep:
    """Blocks of 1 to 16 tokens, 1 to 3 kv heads in groups of 1 to 7, heads of 1 to 40; every switch on or off."""
    random = np.random.default_rng(seed)
    size = int(random.choice([1, 3, 4, 5, 16]))
    rules = replace(random_rules(random), block_size=size)
    work = random_work(random, rules, most_sequences=most_sequences, most_blocks=4 if size == 16 else 12)
    kv_heads = int(random.integers(1, 4))
    key_dim = int(random.integers(1, 41))
    value_dim = 8 * int(random.integers(1, 6)) if random.random() < 0.8 else int(random.integers(1, 41))
    heads = kv_heads * rules.group
    mask = Mask(
        scale=float(random.uniform(0.5, 1.5)) / math.sqrt(key_dim),
        window=rules.window,
        softcap=1.5 if random.random() < 0.3 else None,
        sinks=torch.from_numpy(random.normal(size=heads).astype(np.float32)) if random.random() < 0.3 else None,
    )
    draws = torch.Generator().manual_seed(seed)
    slots = covered(work)
    num_blocks = int(slots.max()) // size + 2
    keys = torch.full((num_blocks * size, kv_heads, key_dim), math.nan)
    values = torch.full((num_blocks * size, kv_heads, value_dim), math.nan)
    keys[slots] = torch.randn(len(slots), kv_heads, key_dim, generator=draws)
    values[slots] = torch.randn(len(slots), kv_heads, value_dim, generator=draws)
    q = torch.randn(sum(work.q_lens), heads, key_dim, generator=draws)
    step = Step(q, keys.unflatten(0, (num_blocks, size)), values.unflatten(0, (num_blocks, size)), work)
    return RandomStep(step, mask, rules)


def covered(work: Work) -> torch.Tensor:
    """int64 [num_slots]: where the positions of all sequences lie, each once."""
    slots = []
    for table, kv_len in zip(work.block_table.long(), work.kv_lens, strict=True):
        positions = torch.arange(kv_len)
        slots.append(table[positions // work.block_size] * work.block_size + positions % work.block_size)
    return torch.cat(slots).unique()
