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


@dataclass(frozen=True, slots=True)
class DeviceLists:
    """A list is as long as its bucket, a power of two; programs beyond the entry of `counts` return at once.

    So the grid depends on the buckets only, and a captured launch serves every step that falls into them.
    """

    counts: Tensor  # int32 [4]: wide, narrow, merged, 0
    wide: Tensor  # int32 [bucket, 6]
    narrow: Tensor  # int32 [bucket, 6]
    block_ids: Tensor  # int32 [bucket]
    positions: Tensor  # int32 [num_tokens]
    merged_tokens: Tensor  # int32 [bucket]
    merged_starts: Tensor  # int32 [bucket + 1]
    merged_slots: Tensor  # int32 [bucket]
    num_slots: int  # rows of the partials, a bucket


def to_device(listed: Worklist, device: torch.device) -> DeviceLists:
    """The only copy of a step; entries beyond a list's end are zero and never used."""
    merges = listed.merges
    arrays = [
        np.array([len(listed.wide), len(listed.narrow), len(merges.tokens), 0], np.int32),
        _bucketed(listed.wide),
        _bucketed(listed.narrow),
        _bucketed(listed.block_ids),
        listed.positions,
        _bucketed(merges.tokens),
        np.pad(merges.starts, (0, bucket(len(merges.tokens)) + 1 - len(merges.starts))),
        _bucketed(merges.slots),
    ]
    sizes = [-(-array.size // _ALIGN) * _ALIGN for array in arrays]
    staging = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
    view: NDArray[np.int32] = staging.numpy()
    starts = np.cumsum([0, *sizes[:-1]])
    for start, array in zip(starts, arrays, strict=True):
        view[start : start + array.size] = array.ravel()
    moved = staging.to(device, non_blocking=True)
    views = [moved[start : start + array.size].view(array.shape) for start, array in zip(starts, arrays, strict=True)]
    counts, wide, narrow, block_ids, positions, tokens, begins, slots = views
    return DeviceLists(
        counts, wide, narrow, block_ids, positions, tokens, begins, slots, num_slots=bucket(listed.num_slots)
    )


def bucket(num: int) -> int:
    """The next power of two; none for none."""
    return 1 << (num - 1).bit_length() if num else 0


def _bucketed(array: NDArray[np.int32]) -> NDArray[np.int32]:
    return np.pad(array, [(0, bucket(len(array)) - len(array)), *[(0, 0)] * (array.ndim - 1)])
