"""The layout of keys and values that plain torch reads: slot after slot, head by head."""

from torch import Tensor

from batchrun_kernels.contract import KVLayer, KVPool


class SlotMajor:
    """Keys [num_blocks, block_size, kv_heads, key_dim], values [num_blocks, block_size, kv_heads, value_dim]."""

    def allocate(self, num_blocks: int, block_size: int, layer: KVLayer, place: Tensor) -> KVPool:
        rows = (num_blocks, block_size, layer.num_kv_heads)
        return KVPool(place.new_empty(*rows, layer.key_dim), place.new_empty(*rows, layer.value_dim))

    def write(
        self,
        pool: KVPool,
        key: Tensor,  # [num_tokens, kv_heads, key_dim]
        value: Tensor,  # [num_tokens, kv_heads, value_dim]
        slots: Tensor,  # int64 [num_tokens]
    ) -> None:
        pool.keys.flatten(0, 1)[slots] = key
        pool.values.flatten(0, 1)[slots] = value

    def copy_slots(
        self,
        pool: KVPool,
        sources: Tensor,  # int64 [num_copies]
        targets: Tensor,  # int64 [num_copies]
    ) -> None:
        for tensor in (pool.keys, pool.values):
            rows = tensor.flatten(0, 1)
            rows[targets] = rows[sources]
