"""Drives a runner or a model by hand: sequences, blocks and items without a scheduler."""

from collections.abc import Sequence as Ids

import numpy as np

from batchrun.engine.request import Request, SamplingParams
from batchrun.engine.sequence import Sequence
from batchrun.engine.step import Item, Sampled, ScheduledBatch


class Blocks:
    """Hands out a pool's blocks in a shuffled order."""

    def __init__(self, num_blocks: int, seed: int = 0) -> None:
        self._free: list[int] = np.random.default_rng(seed).permutation(num_blocks).tolist()

    def take(self, num: int) -> list[int]:
        return [self._free.pop() for _ in range(num)]


def make_sequence(
    row: int, ids: Ids[int], blocks: list[int], sampling: SamplingParams | None = None, output_ids: tuple[int, ...] = ()
) -> Sequence:
    sampling = sampling or SamplingParams(max_tokens=16)
    sequence = Sequence(Request(row, np.array(ids, dtype=np.int32), sampling, output_ids=output_ids), arrival=row)
    sequence.block_table = blocks
    return sequence


def next_item(sequence: Sequence, budget: int) -> Item:
    """Up to `budget` of the tokens that are not computed yet."""
    num = min(sequence.gap, budget)
    return Item(sequence, sequence.num_computed, num, sequence.num_computed + num == sequence.num_tokens)


def advance(batch: ScheduledBatch, sampled: Sampled) -> None:
    """What a scheduler does after a step: everything computed counts, sampled tokens are appended."""
    for item in batch.items:
        item.sequence.num_computed += item.num_tokens
    for item, token in zip(batch.sampled, sampled.tokens, strict=True):
        item.sequence.expect()
        item.sequence.resolve(int(token))
