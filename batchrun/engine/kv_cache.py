"""The pool of key and value blocks, and the object that stands for it inside transformers' modeling code.

Owns the tensors; how keys and values lie in a block is the attention's choice. Knows nothing of sequences or of who
uses which block: a step tells it slots.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from batchrun.engine.batch import ForwardBatch
from batchrun_kernels import Attention, KVLayer, KVPool, Mask

# The attribute of a tensor whose keys or values a cache has written.
_MARK = "batchrun_layer"


@dataclass(frozen=True, slots=True)
class PagedLayer:
    """What a layer's attention needs in a step, once its keys and values are written."""

    pool: KVPool
    attention: Attention
    plan: Any

    def attend(
        self,
        q: Tensor,  # [num_tokens, num_heads, key_dim]
        mask: Mask,
    ) -> Tensor:
        """[num_tokens, num_heads, value_dim]."""
        return self.attention.attend(q, self.pool.keys, self.pool.values, self.plan, mask)


def paged_layer(key: Tensor, value: Tensor) -> PagedLayer | None:
    """The layer that both were written to in this step; None: what they are is in no pool."""
    layer: PagedLayer | None = getattr(key, _MARK, None)
    return layer if layer is getattr(value, _MARK, None) else None


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
        self.pools: dict[int, KVPool] = {}
        self.layers: dict[int, KVLayer] = {}  # by the layer's index in the model
        self.attention = attention
        self._place = place
        self._step: ForwardBatch | None = None
        self._plan: Any = None

    def allocate(self, layer_idx: int, layer: KVLayer) -> None:
        self.pools[layer_idx] = self.attention.layout.allocate(self.num_blocks, self.block_size, layer, self._place)
        self.layers[layer_idx] = layer

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers that have been allocated."""
        return sum(layer.block_bytes(self.block_size, self._place.dtype) for layer in self.layers.values())

    def begin(self, step: ForwardBatch, plan: Any) -> None:
        """All layers' `update`s up to the next `begin` belong to this step; `plan` is the attention's for it."""
        self._step = step
        self._plan = plan

    def update(
        self,
        key: Tensor,  # [1, kv_heads, num_tokens, key_dim]
        value: Tensor,  # [1, kv_heads, num_tokens, value_dim]
        layer_idx: int,
        kwargs: dict[str, Any] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Writes the step's keys and values and does its slot copies; both tensors come back, marked with the layer.

        By the mark `paged_layer` knows, in the attention function, where they lie: of the layer that wrote them, or
        of a later one that shares them.
        """
        step = self._step
        assert step is not None, "update before begin"
        if layer_idx not in self.pools:
            self.allocate(layer_idx, KVLayer(key.shape[1], key.shape[-1], value.shape[-1]))
        pool, layout = self.pools[layer_idx], self.attention.layout
        layout.write(pool, key[0].transpose(0, 1), value[0].transpose(0, 1), step.slots)
        if len(step.copy_sources):
            layout.copy_slots(pool, step.copy_sources, step.copy_targets)
        layer: Any = PagedLayer(pool, self.attention, self._plan)
        for tensor in (key, value):
            setattr(tensor, _MARK, layer)
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Zero: positions are always given, never derived from what the cache has seen."""
        return 0

    def __len__(self) -> int:
        return len(self.pools)
