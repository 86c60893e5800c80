"""One step's work as the scheduler decides it: integers only, no tensor and no text."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from batchrun.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Item:
    """Tokens `start ... start + num_tokens` of one sequence, computed in this step.

    All earlier positions are in the cache (or are being written in this same step by another item); the
    sequence's `block_table` covers every position up to the end. `samples` is true when the last of these
    tokens is the sequence's last one, so that its logits choose the next token.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool


@dataclass(frozen=True, slots=True)
class SwapOut:
    """Copy pool blocks to host slots, before anything else of the step: the blocks are reused in it."""

    blocks: tuple[int, ...]
    host_slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SwapIn:
    """Copy host slots back into pool blocks, after all `SwapOut`s and before the forward pass."""

    host_slots: tuple[int, ...]
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One forward pass.

    `slot_copies` are (source slot, destination slot) pairs, a slot being `block * block_size + offset`. Every
    layer first writes all keys and values of the step, then does these copies, and attends last: so that a row
    may share a partly equal block (copy on write), even with a row of the same step. Sources are computed before
    or written by an item of this step, and are never destinations; destinations are written by no item of this
    step. So the copies may run in any order, or as one gather and scatter.
    """

    items: tuple[Item, ...]
    swap_outs: tuple[SwapOut, ...] = ()
    swap_ins: tuple[SwapIn, ...] = ()
    slot_copies: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.items)

    @property
    def sampled(self) -> tuple[Item, ...]:
        """The items that sample a token, in the order of `items`."""
        return tuple(item for item in self.items if item.samples)


@dataclass(frozen=True, slots=True)
class Sampled:
    """The tokens chosen in a step, one for each of `ScheduledBatch.sampled`, in that order."""

    tokens: NDArray[np.int32]  # [num_sampled]
    swap_bytes: int = 0
    swap_seconds: float = 0.0


class Runner(Protocol):
    """Carries out a step: the seam between the scheduler's integers and a model's tensors.

    `num_blocks` pool blocks of `block_size` tokens and `num_host_slots` block-sized places on the host exist.
    """

    block_size: int
    num_blocks: int
    num_host_slots: int
    block_bytes: int
    is_gpu: bool

    def execute(self, batch: ScheduledBatch) -> Sampled:
        """Swap, compute and sample; returns when the sampled tokens are on the host."""
        ...
