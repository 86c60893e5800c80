"""The pool of key and value blocks, and the object that stands for it inside transformers' modeling code.

Owns the tensors. Knows nothing of sequences or of who uses which block: a step tells it slots.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from batchrun.engine.batch import ForwardBatch
from batchrun_kernels import Attention, Mask


@dataclass(frozen=True, slots=True)
class KVLayer:
    """The shape of one layer's keys and values."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        return block_size * self.num_kv_heads * (self.key_dim + self.value_dim) * dtype.itemsize


@dataclass(frozen=True, slots=True)
class PagedLayer:
    """What a layer's attention needs in a step, once its keys and values are written."""

    keys: Tensor  # [num_blocks, block_size, kv_heads, key_dim]
    values: Tensor  # [num_blocks, block_size, kv_heads, value_dim]
    attention: Attention
    plan: Any

    def attend(
        self,
        q: Tensor,  # [num_tokens, num_heads, key_dim]
        mask: Mask,
    ) -> Tensor:
        """[num_tokens, num_heads, value_dim]."""
        return self.attention.attend(q, self.keys, self.values, self.plan, mask)


class KVCache:
    """Blocks of keys and values, layer by layer; passed to a model as its `cache`.

    `begin` names the step; in the forward pass each layer calls `update` and then attends. A layer's tensors are
    made at `allocate`, or at the first `update` that names the layer. New memory is not initialised.
    """

    is_compileable = False

    def __init__(self, num_blocks: int, block_size: int, attention: Attention, place: Tensor) -> None:
        """`place` is any tensor of the pool's dtype on the pool's device."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.attention = attention
        self._place = place
        self._step: ForwardBatch | None = None
        self._plan: Any = None

    def allocate(self, layer_idx: int, layer: KVLayer) -> None:
        rows = (self.num_blocks, self.block_size, layer.num_kv_heads)
        self.keys[layer_idx] = self._place.new_empty(*rows, layer.key_dim)
        self.values[layer_idx] = self._place.new_empty(*rows, layer.value_dim)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers that have been allocated."""
        return sum(layer.block_bytes(self.block_size, self._place.dtype) for layer in self.layers.values())

    @property
    def layers(self) -> dict[int, KVLayer]:
        """The shape of every layer that has been allocated, by the layer's index in the model."""
        return {
            index: KVLayer(keys.shape[2], keys.shape[3], self.values[index].shape[3])
            for index, keys in self.keys.items()
        }

    def begin(self, step: ForwardBatch) -> None:
        """All layers' `update`s up to the next `begin` belong to this step."""
        self._step = step
        self._plan = self.attention.plan(step.work)

    def update(
        self,
        key: Tensor,  # [1, kv_heads, num_tokens, key_dim]
        value: Tensor,  # [1, kv_heads, num_tokens, value_dim]
        layer_idx: int,
        kwargs: dict[str, Any] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Writes the step's keys and values, then does its slot copies, and hands the layer to the attention.

        The attention function finds the layer under "paged" in `kwargs`, which is what it is called with.
        """
        step = self._step
        assert step is not None, "update before begin"
        if layer_idx not in self.keys:
            self.allocate(layer_idx, KVLayer(key.shape[1], key.shape[-1], value.shape[-1]))
        for pool, new in ((self.keys[layer_idx], key), (self.values[layer_idx], value)):
            slots = pool.flatten(0, 1)
            slots[step.slots] = new[0].transpose(0, 1)
            if len(step.copy_sources):
                slots[step.copy_targets] = slots[step.copy_sources]
        if kwargs is not None:
            kwargs["paged"] = PagedLayer(self.keys[layer_idx], self.values[layer_idx], self.attention, self._plan)
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Zero: positions are always given, never derived from what the cache has seen."""
        return 0

    def __len__(self) -> int:
        return len(self.keys)
