"""What attention reads and writes on the device: the pool of a layer, and partial results."""

from dataclasses import dataclass

import torch
from torch import Tensor

Strides = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Pool:
    """A layer's keys and values; with scales, a stored x stands for x * scale.

    Scales may be views that repeat one number (`torch.Tensor.expand`): strides of 0 are fine.
    """

    keys: Tensor  # [num_blocks, block_size, kv_heads, head_dim]; last stride 1
    values: Tensor  # [num_blocks, block_size, kv_heads, value_dim]; last stride 1
    key_scales: Tensor | None = None  # float32 [num_blocks, block_size, kv_heads]
    value_scales: Tensor | None = None  # float32 [num_blocks, block_size, kv_heads]

    def __post_init__(self) -> None:
        assert self.keys.shape[:3] == self.values.shape[:3], (self.keys.shape, self.values.shape)
        assert self.keys.dtype == self.values.dtype, (self.keys.dtype, self.values.dtype)
        assert (self.key_scales is None) == (self.value_scales is None), "scales for keys and values, or for neither"
        for scales in (self.key_scales, self.value_scales):
            if scales is not None:
                assert scales.shape == self.keys.shape[:3], (scales.shape, self.keys.shape)
                assert scales.dtype == torch.float32, scales.dtype
        assert self.is_quantised == (self.key_scales is not None), f"{self.keys.dtype} with or without scales"

    @property
    def is_quantised(self) -> bool:
        return self.keys.dtype.itemsize == 1

    @property
    def scale_strides(self) -> tuple[Strides, Strides]:
        """Of the keys' and the values' scales; zeros where there are none."""
        if self.key_scales is None or self.value_scales is None:
            return (0, 0, 0), (0, 0, 0)
        key, value = self.key_scales.stride(), self.value_scales.stride()
        return (key[0], key[1], key[2]), (value[0], value[1], value[2])


@dataclass(frozen=True, slots=True)
class Partials:
    """Attention over some of a row's keys: the result, and the log of its mass in base 2 (-inf: it saw nothing)."""

    values: Tensor  # float32 [num_slots, num_heads, value_dim]
    lse: Tensor  # float32 [num_slots, num_heads]

    def check(self, num_slots: int, num_heads: int, value_dim: int) -> None:
        assert self.values.shape == (num_slots, num_heads, value_dim), (self.values.shape, num_slots)
        assert self.lse.shape == (num_slots, num_heads), (self.lse.shape, num_slots)
        assert self.values.dtype == self.lse.dtype == torch.float32, (self.values.dtype, self.lse.dtype)
        assert self.values.is_contiguous(), self.values.stride()
        assert self.lse.is_contiguous(), self.lse.stride()
