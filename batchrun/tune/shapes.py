"""Which steps are measured: a grid of decode steps, prompt chunks and mixtures of both, made without a scheduler.

Integers only; knows nothing of clocks or devices.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from batchrun.engine.request import Request, SamplingParams, TokenIds
from batchrun.engine.sequence import Sequence
from batchrun.engine.step import Item, ScheduledBatch

_CONTEXTS = (64, 512, 2048)  # of decoded rows; tokens
_BEHIND = (0, 512, 2048, 4096)  # tokens computed before a chunk
_SMALLEST_CHUNK = 32
_GENERATED = SamplingParams(max_tokens=1)


@dataclass(frozen=True, slots=True)
class Group:
    """`num_rows` rows that each compute `num_tokens` behind `num_cached` and then, if it `samples`, draw one."""

    num_rows: int
    num_tokens: int
    num_cached: int
    samples: bool

    @property
    def length(self) -> int:
        """Of each row, in tokens."""
        return self.num_cached + self.num_tokens


@dataclass(frozen=True, slots=True)
class Shape:
    """One step to be measured."""

    groups: tuple[Group, ...]

    @property
    def num_tokens(self) -> int:
        return sum(group.num_rows * group.num_tokens for group in self.groups)

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(group.length for group in self.groups)

    def num_blocks(self, block_size: int) -> int:
        """Blocks of all rows when they share none."""
        return sum(group.num_rows * -(-group.length // block_size) for group in self.groups)


def grid(*, max_rows: int, max_tokens: int, max_len: int) -> list[Shape]:
    """Steps of up to `max_rows` rows and `max_tokens` tokens, none of them longer than `max_len`; smallest first."""
    found = [*_decodes(max_rows, max_len), *_chunks(max_tokens, max_len), *_mixtures(max_rows, max_tokens)]
    fitting = dict.fromkeys(shape for shape in found if shape.longest <= max_len and shape.num_tokens <= max_tokens)
    return sorted(fitting, key=lambda shape: shape.num_tokens)


def make_batch(shape: Shape, *, block_size: int, num_blocks: int, vocab_size: int) -> ScheduledBatch:
    """The step, with rows in the first `num_blocks` blocks of the pool: in other blocks each, as far as there are."""
    ids = token_ids(shape.longest, vocab_size)
    items: list[Item] = []
    num_taken = 0
    for group in shape.groups:
        for _ in range(group.num_rows):
            sequence = Sequence(Request(len(items), ids[: group.length], _GENERATED), arrival=len(items))
            needed = -(-group.length // block_size)
            sequence.block_table = [at % num_blocks for at in range(num_taken, num_taken + needed)]
            sequence.num_computed = group.num_cached
            items.append(Item(sequence, group.num_cached, group.num_tokens, group.samples))
            num_taken += needed
    return ScheduledBatch(tuple(items))


def token_ids(num: int, vocab_size: int) -> TokenIds:
    """Some tokens of a prompt; int32 [num]."""
    return (np.arange(num, dtype=np.int32) * 7 + 3) % np.int32(vocab_size)


def _decodes(max_rows: int, max_len: int) -> Iterator[Shape]:
    for context in sorted({min(context, max_len) for context in _CONTEXTS}):
        for num_rows in _doubling(1, max_rows):
            yield Shape((_decode(num_rows, context),))


def _chunks(max_tokens: int, max_len: int) -> Iterator[Shape]:
    """Of one row; of several where the model's length ends before."""
    for num_tokens in _doubling(min(_SMALLEST_CHUNK, max_tokens), max_tokens):
        # The largest only in front: behind others it would take most of the time there is.
        for num_cached in _BEHIND if 2 * num_tokens <= max_tokens else _BEHIND[:1]:
            if num_cached < max_len:
                num_rows = -(-num_tokens // (max_len - num_cached))
                yield Shape((Group(num_rows, num_tokens // num_rows, num_cached, samples=False),))


def _mixtures(max_rows: int, max_tokens: int) -> Iterator[Shape]:
    """What a job does most: rows that decode beside a long prompt's chunk, or beside short ends of prompts."""
    few, some, many = max(1, max_rows // 16), max(1, max_rows // 4), max(1, max_rows // 2)
    yield Shape((_decode(some, 512), Group(1, max(1, max_tokens // 4), 0, samples=False)))
    yield Shape((_decode(many, 64), Group(1, max(1, max_tokens // 2 - many), 512, samples=False)))
    yield Shape((_decode(some, 64), Group(few, 60, 512, samples=True)))
    yield Shape((_decode(max_rows, 512), Group(few, 60, 0, samples=True)))
    yield Shape((Group(2 * few, 60, 512, samples=True),))
    yield Shape((Group(2 * few, 60, 0, samples=True),))


def _decode(num_rows: int, context: int) -> Group:
    return Group(num_rows, 1, context - 1, samples=True)


def _doubling(first: int, last: int) -> Iterator[int]:
    while first <= last:
        yield first
        first *= 2
