"""A step as tensors: the only place where the scheduler's lists become tensors."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchrun_kernels import Work

if TYPE_CHECKING:
    from batchrun.engine.step import Item, ScheduledBatch


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The items of a step one after another: one packed row of tokens, no padding."""

    input_ids: Tensor  # int64 [1, num_tokens]
    positions: Tensor  # int64 [1, num_tokens]
    slots: Tensor  # int64 [num_tokens], where each token's keys and values go: block * block_size + offset
    copy_sources: Tensor  # int64 [num_copies], slots
    copy_targets: Tensor  # int64 [num_copies], slots
    sampled: Tensor  # int64 [num_sampled], the packed tokens whose logits choose a next one
    work: Work


def pack(batch: "ScheduledBatch", block_size: int, device: torch.device) -> ForwardBatch:
    """The tensors of a step with at least one item, on `device`."""
    items = batch.items
    assert items, "a step without items has nothing to compute"
    q_lens = np.fromiter((item.num_tokens for item in items), np.int64, len(items))
    table = _block_table(items, block_size)
    positions = np.concatenate([np.arange(item.start, item.start + item.num_tokens) for item in items])
    owners = np.repeat(np.arange(len(items)), q_lens)
    slots = table[owners, positions // block_size].astype(np.int64) * block_size + positions % block_size
    ids = np.concatenate([item.sequence.tokens[item.start : item.start + item.num_tokens] for item in items])
    last = np.cumsum(q_lens) - 1
    samples = np.fromiter((item.samples for item in items), np.bool_, len(items))
    copies = np.array(batch.slot_copies, dtype=np.int64).reshape(-1, 2)
    return ForwardBatch(
        input_ids=_tensor(ids.astype(np.int64), device)[None],
        positions=_tensor(positions, device)[None],
        slots=_tensor(slots, device),
        copy_sources=_tensor(copies[:, 0], device),
        copy_targets=_tensor(copies[:, 1], device),
        sampled=_tensor(last[samples], device),
        work=Work(
            q_lens=tuple(q_lens.tolist()),
            kv_lens=tuple(item.start + item.num_tokens for item in items),
            block_table=torch.from_numpy(table),
            block_size=block_size,
        ),
    )


def _block_table(items: "tuple[Item, ...]", block_size: int) -> NDArray[np.int32]:
    """int32 [num_items, max_blocks]: the blocks up to each item's end, zero behind."""
    num_blocks = [-(-(item.start + item.num_tokens) // block_size) for item in items]
    table = np.zeros((len(items), max(num_blocks)), dtype=np.int32)
    for row, item, wanted in zip(table, items, num_blocks, strict=True):
        blocks = item.sequence.block_table
        assert len(blocks) >= wanted, f"row {item.sequence.request.row_idx}: {len(blocks)} blocks, {wanted} needed"
        row[:wanted] = blocks[:wanted]
    return table


def _tensor(values: NDArray[np.int64] | NDArray[np.int32], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device)
