"""The layout of keys and values that the Triton kernels read: what a program reads of a block lies together."""

from torch import Tensor

from batchrun_kernels.contract import KVLayer, KVPool
from batchrun_kernels.triton.pool import Pool
from batchrun_kernels.triton.write_kv import write_kv_launch


class HeadMajor:
    """Keys [num_blocks, kv_heads, block_size, key_dim], values [num_blocks, kv_heads, block_size, value_dim]."""

    def allocate(self, num_blocks: int, block_size: int, layer: KVLayer, place: Tensor) -> KVPool:
        rows = (num_blocks, layer.num_kv_heads, block_size)
        return KVPool(place.new_empty(*rows, layer.key_dim), place.new_empty(*rows, layer.value_dim))

    def write(
        self,
        pool: KVPool,
        key: Tensor,  # [num_tokens, kv_heads, key_dim]
        value: Tensor,  # [num_tokens, kv_heads, value_dim]
        slots: Tensor,  # int64 [num_tokens]; negative: a token that is written nowhere
    ) -> None:
        key = key if key.stride(2) == 1 else key.contiguous()
        value = value if value.stride(2) == 1 else value.contiguous()
        write_kv_launch(key, value, as_slots(pool), slots.contiguous()).run()

    def copy_slots(
        self,
        pool: KVPool,
        sources: Tensor,  # int64 [num_copies]
        targets: Tensor,  # int64 [num_copies]
    ) -> None:
        size = pool.keys.shape[2]
        for tensor in (pool.keys, pool.values):
            tensor[targets // size, :, targets % size] = tensor[sources // size, :, sources % size]


def as_slots(pool: KVPool) -> Pool:
    """The same memory, slot by slot: [num_blocks, block_size, kv_heads, ...]."""
    return Pool(pool.keys.transpose(1, 2), pool.values.transpose(1, 2))
