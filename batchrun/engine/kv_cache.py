"""The pool of key and value blocks, and the object that stands for it inside transformers' modeling code.

Owns the tensors; how keys and values lie in a block is the attention's choice. Knows nothing of sequences or of who
uses which block: a step tells it slots.
"""

from typing import Any
from weakref import ReferenceType, ref

from torch import Tensor

from batchrun.engine.batch import ForwardBatch
from batchrun.engine.state_pool import StatePool
from batchrun_kernels import Attention, KVLayer, KVPool, Mask, WholeLayer

# The attribute of keys and values that a cache was shown: the `PagedLayer` of theirs.
_MARK = "batchrun_layer"


class PagedLayer:
    """A layer in a step, which stores the keys and values that it is first made to attend to.

    Those need not be what the cache was shown: latents are expanded in between.
    """

    def __init__(self, cache: "KVCache", layer_idx: int) -> None:
        self._cache = cache
        self._layer_idx = layer_idx
        self._stored: tuple[ReferenceType[Tensor], ReferenceType[Tensor]] | None = None

    def store(
        self,
        key: Tensor,  # [1, kv_heads, num_tokens, key_dim]
        value: Tensor,  # [1, kv_heads, num_tokens, value_dim]
    ) -> bool:
        """Whether these are in the pool now; False: others are, or they are not one for each of the step's tokens."""
        if self._stored is not None:
            return self._stored[0]() is key and self._stored[1]() is value
        num_tokens = self._cache.num_tokens
        if (key.shape[0], key.shape[2]) != (1, num_tokens) or value.shape[:3] != key.shape[:3]:
            return False
        self._cache.write(self._layer_idx, key[0].transpose(0, 1), value[0].transpose(0, 1))
        # Weak, since the tensors know this object.
        self._stored = ref(key), ref(value)
        return True

    def attend(
        self,
        q: Tensor,  # [num_tokens, num_heads, key_dim]
        mask: Mask,
    ) -> Tensor:
        """[num_tokens, num_heads, value_dim], after `store`."""
        return self._cache.attend(self._layer_idx, q, mask)


def marked_layer(key: Tensor, value: Tensor) -> PagedLayer | None:
    """The layer for which a cache was shown both of these very tensors."""
    layer: PagedLayer | None = getattr(key, _MARK, None)
    return layer if layer is getattr(value, _MARK, None) else None


class KVCache:
    """Blocks of keys and values, layer by layer; passed to a model as its `cache`.

    `begin` names the step; in the forward pass each layer calls `update` and then attends. A layer's tensors are
    made at `allocate`, or when it first attends. New memory is not initialised. `states` are those of the layers that
    keep something else, if there are any.
    """

    is_compileable = False

    def __init__(
        self, num_blocks: int, block_size: int, attention: Attention, place: Tensor, states: StatePool | None = None
    ) -> None:
        """`place` is any tensor of the pool's dtype on the pool's device."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.pools: dict[int, KVPool] = {}
        self.layers: dict[int, KVLayer] = {}  # by the layer's index in the model
        self.attention = attention
        self.states = states
        self._place = place
        self.masks: list[Mask] = []  # how the step's layers have asked so far
        self._step: ForwardBatch | None = None
        self._plan: Any = None

    def allocate(self, layer_idx: int, layer: KVLayer) -> None:
        self.pools[layer_idx] = self.attention.layout.allocate(self.num_blocks, self.block_size, layer, self._place)
        self.layers[layer_idx] = layer

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers that have been allocated."""
        return sum(layer.block_bytes(self.block_size, self._place.dtype) for layer in self.layers.values())

    @property
    def num_tokens(self) -> int:
        """Tokens of the step, padding included."""
        assert self._step is not None, "no step has begun"
        return len(self._step.slots)

    @property
    def sampled(self) -> Tensor | None:
        """int64 [num_sampled]: the step's tokens behind which something is read; None where it is all of them."""
        assert self._step is not None, "no step has begun"
        return self._step.sampled if len(self._step.sampled) < self.num_tokens else None

    def begin(self, step: ForwardBatch, plan: Any) -> None:
        """All layers' `update`s up to the next `begin` belong to this step; `plan` is the attention's for it."""
        self._step = step
        self._plan = plan
        self.masks = []
        if self.states is not None:
            self.states.begin(step)

    def commit(self) -> None:
        """The step was computed: the states that it left are its sequences' now. The next `begin` does it, too."""
        if self.states is not None:
            self.states.commit()

    def discard(self) -> None:
        """The step was not computed, and may be computed again, from the states of before."""
        if self.states is not None:
            self.states.discard()

    def update(
        self,
        key: Tensor,  # [1, heads, num_tokens, dim], or what keys are made from
        value: Tensor,  # [1, heads, num_tokens, dim], or what values are made from
        layer_idx: int,
        kwargs: dict[str, Any] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns both, and stores nothing yet: the attention function does, with what the layer then calls it with.

        It finds the layer by a mark on the tensors, which a later layer may share, or else under "paged" in `kwargs`,
        which it is called with.
        """
        layer: Any = PagedLayer(self, layer_idx)
        for tensor in (key, value):
            setattr(tensor, _MARK, layer)
        if kwargs is not None:
            kwargs["paged"] = layer
        return key, value

    def write(
        self,
        layer_idx: int,
        key: Tensor,  # [num_tokens, kv_heads, key_dim]
        value: Tensor,  # [num_tokens, kv_heads, value_dim]
    ) -> None:
        """Writes the step's keys and values, then does its slot copies."""
        step, layout = self._step, self.attention.layout
        assert step is not None, "write before begin"
        pool = self._pool(layer_idx, KVLayer(key.shape[1], key.shape[2], value.shape[2]))
        layout.write(pool, key, value, step.slots)
        if len(step.copy_sources):
            layout.copy_slots(pool, step.copy_sources, step.copy_targets)

    def attend(
        self,
        layer_idx: int,
        q: Tensor,  # [num_tokens, num_heads, key_dim]
        mask: Mask,
    ) -> Tensor:
        """[num_tokens, num_heads, value_dim], over what the layer has written in this step and before."""
        pool = self.pools[layer_idx]
        self.masks.append(mask)
        return self.attention.attend(q, pool.keys, pool.values, self._plan, mask)

    @property
    def runs_layers(self) -> bool:
        """Whether layers may be computed by `run_layer`."""
        return self.attention.runs_layers

    def run_layer(
        self,
        layer_idx: int,
        whole: WholeLayer,
        shape: KVLayer,
        x: Tensor,  # [1, num_tokens, width]
        cos: Tensor,  # [1, num_tokens, turned]
        sin: Tensor,  # [1, num_tokens, turned]
        wanted: Tensor | None,  # int64 [num_wanted], tokens; None: all
    ) -> Tensor:
        """[1, num_tokens, width]: the layer's result, its keys and values written and attended to on the way.

        What is not wanted may be zero.
        """
        step = self._step
        assert step is not None, "a layer before begin"
        self.masks.append(whole.mask)
        copies = step.copy_sources, step.copy_targets
        return whole(x, cos, sin, self._pool(layer_idx, shape), step.slots, copies, self._plan, wanted)

    def _pool(self, layer_idx: int, shape: KVLayer) -> KVPool:
        if layer_idx not in self.pools:
            self.allocate(layer_idx, shape)
        return self.pools[layer_idx]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Zero: positions are always given, never derived from what the cache has seen."""
        return 0

    def __len__(self) -> int:
        return len(self.pools)
