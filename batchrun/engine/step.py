"""One step's work as the scheduler decides it: integers only, no tensor and no text."""

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from batchrun.engine.request import PooledHidden, TokenIds, TokenLogprob, TokenLogprobs
from batchrun.engine.sequence import Sequence

NO_TOKEN = -1  # stands for a token where the model's logits were not finite


@dataclass(frozen=True, slots=True)
class Item:
    """Tokens `start ... start + num_tokens` of one sequence, computed in this step.

    All earlier positions are in the cache (or are being written in this same step by another item); the
    sequence's `block_table` covers every position up to the end. `samples` is true when the last of these
    tokens is the sequence's last one, so that its logits choose the next token. The last `num_draft` tokens are a
    guess: a token is chosen before each of them, too. Of a sequence that is read, the positions below `read_from`
    have been read before.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool
    num_draft: int = 0
    read_from: int = 0

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def context(self) -> TokenIds:
        """int32 [end]: the sequence's tokens up to the item's last one."""
        return self.sequence.tokens[: self.end]

    @property
    def output_len(self) -> int:
        """Tokens that the sequence had generated before this step."""
        return self.end - self.sequence.prompt_len

    @property
    def read_positions(self) -> NDArray[np.int32]:
        """The sequence's positions behind which this item is to be read; ascending, each once."""
        reads, start = self.sequence.request.reads, max(self.start, self.read_from)
        match reads:
            case TokenLogprobs():
                own = reads.positions[self.reading_span]
                return own[np.flatnonzero(np.diff(own, prepend=-1))]
            case PooledHidden(pooling="mean"):
                return np.arange(start, self.end, dtype=np.int32)
            case PooledHidden() if self.end == self.sequence.num_tokens:
                return np.array([self.end - 1], dtype=np.int32)
        return np.empty(0, np.int32)

    @property
    def reading_span(self) -> slice:
        """Which entries of the sequence's `TokenLogprobs` are read in this item."""
        reads = self.sequence.request.reads
        assert isinstance(reads, TokenLogprobs), reads
        first, end = np.searchsorted(reads.positions, [max(self.start, self.read_from), self.end])
        return slice(int(first), int(end))

    @property
    def choices(self) -> "tuple[Item, ...]":
        """The item up to each of its tokens behind which one is chosen, in their order."""
        if not self.samples:
            return ()
        if not self.num_draft:
            return (self,)
        certain = self.num_tokens - self.num_draft
        return tuple(replace(self, num_tokens=num, num_draft=0) for num in range(certain, self.num_tokens + 1))


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
    def is_empty(self) -> bool:
        return not (self.items or self.swap_outs or self.swap_ins)

    @property
    def num_swapped(self) -> int:
        """Blocks, each way."""
        return sum(len(out.blocks) for out in self.swap_outs) + sum(len(back.blocks) for back in self.swap_ins)

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.items)

    @property
    def sampled(self) -> tuple[Item, ...]:
        """What a token is chosen behind, in the order of `items`: an item's `choices`."""
        return tuple(choice for item in self.items for choice in item.choices)

    @property
    def reads(self) -> bool:
        """Whether rows are read in it. The rows of a job are all read, or none is."""
        return any(item.sequence.request.reads is not None for item in self.items)

    @property
    def can_be_halved(self) -> bool:
        """A token cannot, nor a row with what is guessed of it."""
        return len(self.items) > 1 or (self.num_tokens > 1 and not self.items[0].num_draft)

    def halves(self) -> "tuple[ScheduledBatch, ScheduledBatch]":
        """Two steps that compute one after another what this one computes; swaps are left out.

        Items only read what items before them write. Slots are copied in both steps: what the first one copies too
        early, nobody reads before the second one.
        """
        assert self.can_be_halved, "half a token"
        first: list[Item] = []
        second: list[Item] = []
        left = self.num_tokens // 2
        for item in self.items:
            taken = min(item.num_tokens, left)
            if item.num_draft and taken < item.num_tokens:
                taken = left = 0 if first else item.num_tokens
            left -= taken
            if 0 < taken < item.num_tokens:
                first.append(replace(item, num_tokens=taken, samples=False))
                second.append(replace(item, start=item.start + taken, num_tokens=item.num_tokens - taken))
            else:
                (first if taken else second).append(item)
        copies = self.slot_copies
        return ScheduledBatch(tuple(first), slot_copies=copies), ScheduledBatch(tuple(second), slot_copies=copies)


@dataclass(frozen=True, slots=True)
class Sampled:
    """The tokens chosen in a step, or `NO_TOKEN`, one for each of `ScheduledBatch.sampled`, in that order.

    `logprobs` are as many where the rows ask for them, else none. `readings` has for each of the step's items, where
    rows are read, what was read in it: as in `Completion`, but of a pooled state the sum over the item. `swap_bytes`
    took `swap_seconds`: copies that ended since the last step that reported any. `was_split`: there was not the memory
    to compute the step at once.
    """

    tokens: NDArray[np.int32]  # [num_sampled]
    swap_bytes: int = 0
    swap_seconds: float = 0.0
    was_split: bool = False
    logprobs: tuple[TokenLogprob, ...] = ()
    readings: tuple[NDArray[np.float64], ...] = ()


class Launched(Protocol):
    """A step that a device has begun, or ended."""

    def wait(self) -> Sampled:
        """Returns when the sampled tokens are on the host."""
        ...


@dataclass(frozen=True, slots=True)
class Ended:
    """A step that was over when its launch returned."""

    sampled: Sampled

    def wait(self) -> Sampled:
        return self.sampled


class Runner(Protocol):
    """Carries out a step: the seam between the scheduler's integers and a model's tensors.

    `num_blocks` pool blocks of `block_size` tokens and `num_host_slots` block-sized places on the host exist, and
    `num_state_slots` places for a sequence's state; 0: sequences have none. Steps
    are carried out in the order of their launches. With `overlaps`, one step may be launched before the last one was
    waited for: a token that is pending on the host is taken from what the last step sampled. A step of
    `num_free_tokens` takes about as long as one of a single token, so that they may be guesses; 0 with `overlaps`.
    A block can be read by another runner of the same `block_format`.
    """

    block_size: int
    num_blocks: int
    num_host_slots: int
    num_state_slots: int
    block_bytes: int
    block_format: str
    is_gpu: bool
    overlaps: bool
    num_free_tokens: int

    def launch(self, batch: ScheduledBatch) -> Launched:
        """Swap, compute and sample. All that the step needs is read before it returns."""
        ...

    def wait_for_copies(self) -> None:
        """Returns when all that was launched has been read from host slots, and written to them."""
        ...

    def close(self) -> None:
        """Ends what was started for the runner; no launch after it."""
        ...
