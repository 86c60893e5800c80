"""A step's work list on the device: one buffer, one copy, all of it read by kernels through views."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchrun_kernels.worklist import Worklist

# Where `counts` holds the length of each list.
WIDE, NARROW, MERGED = range(3)
# int32s in 16 bytes: every view begins where a vector load may.
_ALIGN = 4
# Smaller buckets, and none at all, would make more graphs than they save: programs that return at once cost little.
_SMALLEST = 16
# A slot is 16 KiB of partials in an 8B Llama: a long chunk has tens of thousands, of which few should be for nothing.
_SLOTS_APART = 4096


@dataclass(frozen=True, slots=True)
class ListShape:
    """The lengths of a step's lists, each a bucket, and how they are read: it decides what is launched, and on what."""

    wide: int
    narrow: int
    block_ids: int
    positions: int
    merged: int
    num_slots: int  # also rows of the partials
    run_len: int  # the work list's

    @classmethod
    def of(cls, listed: Worklist) -> "ListShape":
        return cls(
            wide=bucket(len(listed.wide)),
            narrow=bucket(len(listed.narrow)),
            block_ids=bucket(len(listed.block_ids)),
            positions=bucket(len(listed.positions)),
            merged=bucket(len(listed.merges.tokens)),
            num_slots=_slots_bucket(listed.num_slots),
            run_len=listed.run_len,
        )

    @property
    def parts(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the lists, in the order of the buffer."""
        items = ((4,), (self.wide, 7), (self.narrow, 7))
        return (*items, (self.block_ids,), (self.positions,), (self.merged,), (self.merged + 1,), (self.num_slots,))


@dataclass(frozen=True, slots=True)
class DeviceLists:
    """A list is as long as its bucket; programs beyond the entry of `counts` return at once.

    So what is launched depends on the buckets only, and a captured launch serves every step that falls into them.
    """

    shape: ListShape
    buffer: Tensor  # int32; the others are views of it
    counts: Tensor  # int32 [4]: wide, narrow, merged, 0
    wide: Tensor  # int32 [bucket, 7]
    narrow: Tensor  # int32 [bucket, 7]
    block_ids: Tensor  # int32 [bucket]
    positions: Tensor  # int32 [bucket]
    merged_tokens: Tensor  # int32 [bucket]
    merged_starts: Tensor  # int32 [bucket + 1]
    merged_slots: Tensor  # int32 [bucket]

    @property
    def num_slots(self) -> int:
        return self.shape.num_slots

    def refill(self, other: "DeviceLists") -> None:
        """Takes over `other`'s lists, in place: one copy on the current stream."""
        assert self.shape == other.shape, (self.shape, other.shape)
        self.buffer.copy_(other.buffer, non_blocking=True)


def to_device(listed: Worklist, device: torch.device) -> DeviceLists:
    """The only copy of a step; entries beyond a list's end are zero and never used."""
    merges = listed.merges
    counts = np.array([len(listed.wide), len(listed.narrow), len(merges.tokens), 0], np.int32)
    lists = (counts, listed.wide, listed.narrow, listed.block_ids, listed.positions)
    arrays = (*lists, merges.tokens, merges.starts, merges.slots)
    shape = ListShape.of(listed)
    starts = _starts(shape)
    staging = torch.zeros(starts[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
    view: NDArray[np.int32] = staging.numpy()
    for start, array in zip(starts, arrays, strict=False):
        view[start : start + array.size] = array.ravel()
    moved = staging.to(device, non_blocking=True)
    parts = zip(starts, shape.parts, strict=False)
    return DeviceLists(shape, moved, *(moved[start : start + _size(part)].view(part) for start, part in parts))


def bucket(num: int) -> int:
    """The next power of two, at least 16."""
    return max(_SMALLEST, 1 << max(0, num - 1).bit_length())


def _slots_bucket(num: int) -> int:
    return min(bucket(num), max(1, -(-num // _SLOTS_APART)) * _SLOTS_APART)


def _starts(shape: ListShape) -> list[int]:
    """Where each list begins, and the length of the whole."""
    starts = [0]
    for part in shape.parts:
        starts.append(starts[-1] + -(-_size(part) // _ALIGN) * _ALIGN)
    return starts


def _size(part: tuple[int, ...]) -> int:
    return int(np.prod(part))
