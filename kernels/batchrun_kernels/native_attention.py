"""Attention in C on float32, for the CPU: chunks and decode rows alike, straight from the blocks.

Keys and values lie in a pool of float32 or float16; what is multiplied and summed is float32 in both. A row's bits
depend neither on the rows beside it nor on how its prompt was cut into chunks.
"""

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from batchrun_kernels import native
from batchrun_kernels.contract import Feature, KVLayer, KVPool, Layout, Mask, Work

# Columns that are read, and not used, behind the end of the keys.
_READ_BEHIND = 16
# A piece's queries and outputs lie on the stack.
_MAX_DIM = 512


class _Arguments(ctypes.Structure):
    """struct attend in c/native.c."""

    _fields_ = (
        ("q", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("q_lens", ctypes.c_void_p),
        ("kv_lens", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("q_token", ctypes.c_long),
        ("items", ctypes.c_long),
        ("table_width", ctypes.c_long),
        ("heads", ctypes.c_long),
        ("kv_heads", ctypes.c_long),
        ("key_dim", ctypes.c_long),
        ("value_dim", ctypes.c_long),
        ("block_size", ctypes.c_long),
        ("window", ctypes.c_long),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


class _Written(ctypes.Structure):
    """struct written in c/native.c."""

    _fields_ = (
        ("key", ctypes.c_void_p),
        ("value", ctypes.c_void_p),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("sources", ctypes.c_void_p),
        ("targets", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("key_token", ctypes.c_long),
        ("key_head", ctypes.c_long),
        ("value_token", ctypes.c_long),
        ("value_head", ctypes.c_long),
        ("tokens", ctypes.c_long),
        ("turned", ctypes.c_long),
        ("copies", ctypes.c_long),
        ("kv_heads", ctypes.c_long),
        ("key_dim", ctypes.c_long),
        ("value_dim", ctypes.c_long),
        ("block_size", ctypes.c_long),
    )


@dataclass(frozen=True, slots=True)
class NativePlan:
    """A step as the C code reads it."""

    q_lens: Tensor  # int32 [num_items]
    kv_lens: Tensor  # int32 [num_items]
    block_table: Tensor  # int32 [num_items, max_blocks], contiguous
    num_tokens: int
    block_size: int

    def narrowed(
        self,
        wanted: Tensor,  # int64 [num_wanted], tokens in any order
    ) -> "Narrowed":
        """Of every item the tokens from its first wanted one on."""
        q_lens, tokens = self.q_lens.numpy(), wanted.numpy()
        ends = q_lens.cumsum()
        firsts = ends.copy()
        np.minimum.at(firsts, np.searchsorted(ends, tokens, side="right"), tokens)
        items = np.flatnonzero(firsts < ends)
        lens = torch.from_numpy((ends - firsts)[items].astype(np.int32))
        kept = torch.from_numpy(np.flatnonzero(np.arange(self.num_tokens) >= firsts.repeat(q_lens)))
        plan = NativePlan(lens, self.kv_lens[items], self.block_table[items], len(kept), self.block_size)
        return Narrowed(kept, plan)


@dataclass(frozen=True, slots=True)
class Narrowed:
    """The plan of some of a step's tokens: the last ones of their items."""

    tokens: Tensor  # int64 [num_kept], ascending
    plan: NativePlan


class ColumnKeys:
    """Keys [num_blocks, kv_heads, key_dim, block_size], values [num_blocks, kv_heads, block_size, value_dim].

    The scores of neighbouring positions are then one vector, without sums across it. In a pool of float16 values
    are rounded to the nearest, and beyond 65504 to that.
    """

    def allocate(self, num_blocks: int, block_size: int, layer: KVLayer, place: Tensor) -> KVPool:
        heads = num_blocks, layer.num_kv_heads
        num_keys = num_blocks * layer.num_kv_heads * layer.key_dim * block_size
        keys = place.new_empty(num_keys + _READ_BEHIND)[:num_keys].view(*heads, layer.key_dim, block_size)
        return KVPool(keys, place.new_empty(*heads, block_size, layer.value_dim))

    def write(
        self,
        pool: KVPool,
        key: Tensor,  # float32 [num_tokens, kv_heads, key_dim]
        value: Tensor,  # float32 [num_tokens, kv_heads, value_dim]
        slots: Tensor,  # int64 [num_tokens]
    ) -> None:
        num_tokens, kv_heads, key_dim = key.shape
        assert key.dtype == value.dtype == torch.float32, f"{key.dtype}, {value.dtype}"
        assert pool.keys.shape[1:3] == key.shape[1:], f"keys {tuple(key.shape)} for {tuple(pool.keys.shape)}"
        assert slots.shape == (num_tokens,), f"{tuple(slots.shape)} slots for {num_tokens} tokens"
        key = key if key.stride(2) == 1 else key.contiguous()
        value = value if value.stride(2) == 1 else value.contiguous()
        slots = slots.contiguous()
        arguments = _Written(
            key=key.data_ptr(),
            value=value.data_ptr(),
            slots=slots.data_ptr(),
            keys=pool.keys.data_ptr(),
            values=pool.values.data_ptr(),
            key_token=key.stride(0),
            key_head=key.stride(1),
            value_token=value.stride(0),
            value_head=value.stride(1),
            tokens=num_tokens,
            kv_heads=kv_heads,
            key_dim=key_dim,
            value_dim=value.shape[2],
            block_size=pool.keys.shape[3],
        )
        native.needed().batchrun_write(ctypes.byref(arguments), is_half(pool.keys, pool.values))

    def copy_slots(
        self,
        pool: KVPool,
        sources: Tensor,  # int64 [num_copies]
        targets: Tensor,  # int64 [num_copies]
    ) -> None:
        size = pool.keys.shape[3]
        pool.keys[targets // size, :, :, targets % size] = pool.keys[sources // size, :, :, sources % size]
        pool.values[targets // size, :, targets % size] = pool.values[sources // size, :, sources % size]


class NativeAttention:
    """Queries in float32, the pool in float32 or float16; value_dim a multiple of 8."""

    name = "c"
    features: frozenset[Feature] = frozenset({"window", "softcap", "sinks"})
    supports_graphs = False
    runs_layers = True
    layout: Layout = ColumnKeys()

    def fits(self, layer: KVLayer, dtype: torch.dtype) -> bool:
        is_narrow = max(layer.key_dim, layer.value_dim) <= _MAX_DIM
        return dtype == torch.float32 and layer.value_dim % 8 == 0 and is_narrow

    def plan(self, work: Work) -> NativePlan:
        assert work.block_table.dtype == torch.int32, work.block_table.dtype
        return NativePlan(
            torch.tensor(work.q_lens, dtype=torch.int32),
            torch.tensor(work.kv_lens, dtype=torch.int32),
            work.block_table.contiguous(),
            sum(work.q_lens),
            work.block_size,
        )

    def attend(
        self,
        q: Tensor,  # float32 [num_tokens, num_heads, key_dim]
        keys: Tensor,  # float32 or float16 [num_blocks, kv_heads, key_dim, block_size]
        values: Tensor,  # the same type [num_blocks, kv_heads, block_size, value_dim]
        plan: NativePlan,
        mask: Mask,
    ) -> Tensor:
        """float32 [num_tokens, num_heads, value_dim]."""
        num_tokens, num_heads, key_dim = q.shape
        _, kv_heads, block_size, value_dim = values.shape
        assert q.dtype == torch.float32, q.dtype
        assert keys.shape == (len(values), kv_heads, key_dim, block_size), f"{tuple(keys.shape)}, {tuple(values.shape)}"
        assert keys.is_contiguous(), "a pool is contiguous"
        assert values.is_contiguous(), "a pool is contiguous"
        assert num_tokens >= plan.num_tokens, f"{num_tokens} rows of {plan.num_tokens} tokens"
        assert block_size == plan.block_size, f"blocks of {block_size}, planned for {plan.block_size}"
        assert num_heads % kv_heads == 0, f"{num_heads} heads for {kv_heads} kv heads"
        q = q if q.stride()[1:] == (key_dim, 1) else q.contiguous()
        sinks = None if mask.sinks is None else mask.sinks.float().contiguous()
        assert sinks is None or sinks.shape == (num_heads,), f"{mask.sinks} for {num_heads} heads"
        out = q.new_empty(num_tokens, num_heads, value_dim)
        if num_tokens > plan.num_tokens:
            out[plan.num_tokens :] = 0
        arguments = _Arguments(
            q=q.data_ptr(),
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            sinks=None if sinks is None else sinks.data_ptr(),
            out=out.data_ptr(),
            q_lens=plan.q_lens.data_ptr(),
            kv_lens=plan.kv_lens.data_ptr(),
            table=plan.block_table.data_ptr(),
            q_token=q.stride(0),
            items=len(plan.q_lens),
            table_width=plan.block_table.shape[1],
            heads=num_heads,
            kv_heads=kv_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            block_size=block_size,
            window=mask.window or 0,
            scale=mask.scale,
            softcap=mask.softcap or 0.0,
        )
        native.needed().batchrun_attend(ctypes.byref(arguments), is_half(keys, values))
        return out


def is_half(keys: Tensor, values: Tensor) -> bool:
    """Whether a pool is of float16; it is of float32 else."""
    assert keys.dtype == values.dtype, f"{keys.dtype}, {values.dtype}"
    assert keys.dtype in (torch.float32, torch.float16), keys.dtype
    return keys.dtype == torch.float16
