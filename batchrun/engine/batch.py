"""A step as tensors: the only place where the scheduler's lists become tensors."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchrun.engine.queues import to_device
from batchrun.engine.sequence import PENDING, Sequence
from batchrun.engine.step import Item, ScheduledBatch
from batchrun_kernels import Work


@dataclass(frozen=True, slots=True)
class Padding:
    """What stands behind a step's tokens so that it has a size that others have too.

    Padding tokens go to a slot that nobody reads; the samples beyond the step's are of token 0.
    """

    num_tokens: int
    num_sampled: int
    slot: int


@dataclass(frozen=True, slots=True)
class Samples:
    """The tokens a step sampled, on the device, and whose they are."""

    tokens: Tensor  # int64 [num_sampled]
    places: dict[Sequence, int]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The items of a step one after another: one packed row of tokens. All tensors but `work` share one buffer."""

    input_ids: Tensor  # int64 [1, num_tokens]
    positions: Tensor  # int64 [1, num_tokens]
    slots: Tensor  # int64 [num_tokens], where each token's keys and values go: block * block_size + offset
    sampled: Tensor  # int64 [num_sampled], the packed tokens behind which one is chosen, or something is read
    copy_sources: Tensor  # int64 [num_copies], slots
    copy_targets: Tensor  # int64 [num_copies], slots
    state_slots: Tensor  # int64 [num_items], where their sequences' states are; empty where sequences have none
    buffer: Tensor  # int64 [num_integers]
    work: Work

    @property
    def integers(self) -> "StepIntegers":
        """The same on the host."""
        work = self.work
        views = (self.input_ids, self.positions, self.slots, self.sampled, self.copy_sources, self.copy_targets)
        lengths = (*(view.numel() for view in views), self.state_slots.numel())
        buffer = self.buffer.cpu().numpy()
        return StepIntegers(buffer, lengths, work.q_lens, work.kv_lens, work.block_table.numpy(), work.block_size)

    def refill(self, other: "ForwardBatch") -> None:
        """Takes over the tokens of a step without copies that has as many tokens and samples."""
        assert self.input_ids.shape == other.input_ids.shape, (self.input_ids.shape, other.input_ids.shape)
        assert self.sampled.shape == other.sampled.shape, (self.sampled.shape, other.sampled.shape)
        num = 3 * self.slots.numel() + self.sampled.numel()
        self.buffer[:num].copy_(other.buffer[:num])


@dataclass(frozen=True, slots=True)
class StepIntegers:
    """What a `ForwardBatch` is made from, on the host; it can be sent to another process."""

    buffer: NDArray[np.int64]  # [num_integers]: the columns of a `ForwardBatch`, in its order, and what may follow
    lengths: tuple[int, ...]  # of the columns
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    block_table: NDArray[np.int32]  # [num_items, max_blocks]
    block_size: int

    def on(self, device: torch.device) -> ForwardBatch:
        """One copy to the device."""
        buffer = to_device(self.buffer, device)
        views = torch.split(buffer[: sum(self.lengths)], list(self.lengths))
        ids, positions, slots, sampled, copy_sources, copy_targets, state_slots = views
        work = Work(self.q_lens, self.kv_lens, torch.from_numpy(self.block_table), self.block_size)
        return ForwardBatch(
            input_ids=ids[None],
            positions=positions[None],
            slots=slots,
            sampled=sampled,
            copy_sources=copy_sources,
            copy_targets=copy_targets,
            state_slots=state_slots,
            buffer=buffer,
            work=work,
        )


def pack(
    batch: ScheduledBatch,
    block_size: int,
    device: torch.device,
    *,
    last: Samples | None = None,
    padding: Padding | None = None,
) -> ForwardBatch:
    """The tensors of a step with at least one item, on `device`; pending tokens are taken from `last`."""
    items = batch.items
    assert items, "a step without items has nothing to compute"
    table = _block_table(items, block_size)
    q_lens = np.fromiter((item.num_tokens for item in items), np.int64, len(items))
    owners = np.repeat(np.arange(len(items)), q_lens)
    ids = np.concatenate([item.context[item.start :] for item in items])
    positions = np.concatenate([np.arange(item.start, item.end) for item in items])
    slots = table[owners, positions // block_size].astype(np.int64) * block_size + positions % block_size
    firsts = np.cumsum(q_lens) - q_lens
    sampled = np.array(
        [first + place for first, item in zip(firsts, items, strict=True) for place in _looked_behind(item)],
        np.int64,
    )
    copies = np.array(batch.slot_copies, dtype=np.int64).reshape(-1, 2)
    pending = np.flatnonzero(ids == PENDING)
    assert last is not None or not len(pending), "tokens are pending, and nothing was sampled"
    sources = [last.places[items[owner].sequence] for owner in owners[pending]] if last is not None else []
    if padding is not None:
        ids, positions = _padded(ids, padding.num_tokens, 0), _padded(positions, padding.num_tokens, 0)
        slots, sampled = _padded(slots, padding.num_tokens, padding.slot), _padded(sampled, padding.num_sampled, 0)
    states = [item.sequence.state_slot for item in items if item.sequence.state_slot is not None]
    columns = (ids, positions, slots, sampled, copies[:, 0], copies[:, 1], np.array(states, np.int64))
    integers = StepIntegers(
        buffer=np.concatenate((*columns, pending, np.array(sources, np.int64)), dtype=np.int64),
        lengths=tuple(len(column) for column in columns),
        q_lens=tuple(q_lens.tolist()),
        kv_lens=tuple(item.end for item in items),
        block_table=table,
        block_size=block_size,
    )
    forward = integers.on(device)
    if last is not None and len(pending):
        pending_at, pending_from = forward.buffer[sum(integers.lengths) :].view(2, -1)
        # What is no token ends its row when the host sees it; until then it only must not be looked up.
        forward.input_ids[0, pending_at] = last.tokens[pending_from].clamp(min=0)
    return forward


def _looked_behind(item: Item) -> list[int]:
    """The item's tokens behind which one is chosen, or something is read; counted from its first."""
    if item.sequence.request.reads is not None:
        return [int(position) - item.start for position in item.read_positions]
    return [choice.num_tokens - 1 for choice in item.choices]


def _padded(values: NDArray[np.int64], length: int, fill: int) -> NDArray[np.int64]:
    return np.pad(values, (0, length - len(values)), constant_values=fill)


def _block_table(items: tuple[Item, ...], block_size: int) -> NDArray[np.int32]:
    """int32 [num_items, max_blocks]: the blocks up to each item's end, zero behind."""
    num_blocks = [-(-item.end // block_size) for item in items]
    table = np.zeros((len(items), max(num_blocks)), dtype=np.int32)
    for row, item, wanted in zip(table, items, num_blocks, strict=True):
        blocks = item.sequence.block_table
        assert len(blocks) >= wanted, f"row {item.sequence.request.row_idx}: {len(blocks)} blocks, {wanted} needed"
        row[:wanted] = blocks[:wanted]
    return table
