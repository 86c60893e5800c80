"""New keys and values into the pool: rotated by position, quantised where the pool is, queries rotated beside them.

The rotation rounds where transformers' `apply_rotary_pos_emb` does, so that a model's numbers do not change.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchrun_kernels.triton.launch import Launch
from batchrun_kernels.triton.pool import Pool

_HEADS_AT_ONCE = 4
# The largest magnitudes of the dtypes of a quantised pool.
_MOST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


@dataclass(frozen=True, slots=True)
class Rotation:
    """Of the first `2 * cos.shape[1]` dimensions, each of their first half paired with one of the second."""

    cos: Tensor  # [num_tokens, rotary_dim / 2], k's dtype, contiguous
    sin: Tensor  # [num_tokens, rotary_dim / 2], k's dtype, contiguous


@triton.jit
def rotated(
    x: tl.tensor,  # [HEADS, PAD], the tile of x_ptr
    x_ptr: tl.tensor,
    at: tl.tensor,  # [HEADS]
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    token: tl.tensor,
    is_head: tl.tensor,  # [HEADS]
    dim: tl.tensor,  # [PAD]
    HALF: tl.constexpr,
) -> tl.tensor:
    """float32; each product and the sum rounded to x's dtype."""
    dtype = x_ptr.dtype.element_ty
    turns = dim < 2 * HALF
    partner = tl.where(dim < HALF, dim + HALF, dim - HALF)
    other = tl.load(x_ptr + at[:, None] + partner[None, :], mask=is_head[:, None] & turns[None, :], other=0.0)
    other = other.to(tl.float32) * tl.where(dim < HALF, -1.0, 1.0)[None, :]
    angle = token * HALF + tl.where(dim < HALF, dim, dim - HALF)
    cos = tl.load(cos_ptr + angle, mask=turns, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, mask=turns, other=0.0).to(tl.float32)
    direct = (x * cos[None, :]).to(dtype).to(tl.float32)
    crossed = (other * sin[None, :]).to(dtype).to(tl.float32)
    return tl.where(turns[None, :], (direct + crossed).to(dtype).to(tl.float32), x)


@triton.jit
def put(
    x: tl.tensor,  # float32 [HEADS, PAD], zero outside the mask
    pool_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    at: tl.tensor,  # [HEADS]
    scale_at: tl.tensor,  # [HEADS]
    dim: tl.tensor,  # [PAD]
    is_head: tl.tensor,  # [HEADS]
    mask: tl.tensor,  # [HEADS, PAD]
    MOST: tl.constexpr,
) -> None:
    """Into the pool; for a quantised one (`MOST` > 0) with a scale for each head, 1 where all is zero."""
    if MOST > 0:
        largest = tl.max(tl.abs(x), 1)
        scale = tl.where(largest > 0.0, largest / MOST, 1.0)
        tl.store(scale_ptr + scale_at, scale, mask=is_head)
        x = tl.minimum(tl.maximum(x / scale[:, None], -MOST), MOST)
        if pool_ptr.dtype.element_ty == tl.int8:
            x = tl.floor(x + 0.5)
    tl.store(pool_ptr + at[:, None] + dim[None, :], x.to(pool_ptr.dtype.element_ty), mask=mask)


@triton.jit
def write_kv_kernel(
    k_ptr: tl.tensor,  # [num_tokens, KV_HEADS, HEAD_DIM], strided
    v_ptr: tl.tensor,  # [num_tokens, KV_HEADS, VALUE_DIM], strided
    keys_ptr: tl.tensor,  # [num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM], strided
    values_ptr: tl.tensor,  # [num_blocks, BLOCK_SIZE, KV_HEADS, VALUE_DIM], strided
    key_scales_ptr: tl.tensor,  # float32 [num_blocks, BLOCK_SIZE, KV_HEADS], strided, or None
    value_scales_ptr: tl.tensor,  # float32 [num_blocks, BLOCK_SIZE, KV_HEADS], strided, or None
    slots_ptr: tl.tensor,  # int64 [num_tokens]; negative: write nothing
    cos_ptr: tl.tensor,  # [num_tokens, HALF], or None
    sin_ptr: tl.tensor,  # [num_tokens, HALF], or None
    stride_k_token: tl.tensor,
    stride_k_head: tl.tensor,
    stride_v_token: tl.tensor,
    stride_v_head: tl.tensor,
    stride_keys_block: tl.tensor,
    stride_keys_slot: tl.tensor,
    stride_keys_head: tl.tensor,
    stride_values_block: tl.tensor,
    stride_values_slot: tl.tensor,
    stride_values_head: tl.tensor,
    stride_ks_block: tl.tensor,
    stride_ks_slot: tl.tensor,
    stride_ks_head: tl.tensor,
    stride_vs_block: tl.tensor,
    stride_vs_slot: tl.tensor,
    stride_vs_head: tl.tensor,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    MOST: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    block = slot // BLOCK_SIZE
    within = slot % BLOCK_SIZE
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head = head < KV_HEADS  # [HEADS]
    dim = tl.arange(0, HEAD_PAD)
    mask = is_head[:, None] & (dim < HEAD_DIM)[None, :]
    at = token * stride_k_token + head * stride_k_head
    k = tl.load(k_ptr + at[:, None] + dim[None, :], mask=mask, other=0.0).to(tl.float32)  # [HEADS, HEAD_PAD]
    if cos_ptr is not None:
        k = rotated(k, k_ptr, at, cos_ptr, sin_ptr, token, is_head, dim, HALF)
    keys_at = block * stride_keys_block + within * stride_keys_slot + head * stride_keys_head
    scale_at = block * stride_ks_block + within * stride_ks_slot + head * stride_ks_head
    put(k, keys_ptr, key_scales_ptr, keys_at, scale_at, dim, is_head, mask, MOST)
    dim = tl.arange(0, VALUE_PAD)
    mask = is_head[:, None] & (dim < VALUE_DIM)[None, :]
    at = token * stride_v_token + head * stride_v_head
    v = tl.load(v_ptr + at[:, None] + dim[None, :], mask=mask, other=0.0).to(tl.float32)  # [HEADS, VALUE_PAD]
    values_at = block * stride_values_block + within * stride_values_slot + head * stride_values_head
    scale_at = block * stride_vs_block + within * stride_vs_slot + head * stride_vs_head
    put(v, values_ptr, value_scales_ptr, values_at, scale_at, dim, is_head, mask, MOST)


@triton.jit
def rope_kernel(
    x_ptr: tl.tensor,  # [num_tokens, NUM_HEADS, HEAD_DIM], strided
    out_ptr: tl.tensor,  # [num_tokens, NUM_HEADS, HEAD_DIM], contiguous
    cos_ptr: tl.tensor,  # [num_tokens, HALF]
    sin_ptr: tl.tensor,  # [num_tokens, HALF]
    stride_token: tl.tensor,
    stride_head: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head = head < NUM_HEADS  # [HEADS]
    dim = tl.arange(0, HEAD_PAD)
    mask = is_head[:, None] & (dim < HEAD_DIM)[None, :]
    at = token * stride_token + head * stride_head
    x = tl.load(x_ptr + at[:, None] + dim[None, :], mask=mask, other=0.0).to(tl.float32)  # [HEADS, HEAD_PAD]
    x = rotated(x, x_ptr, at, cos_ptr, sin_ptr, token, is_head, dim, HALF)
    out_at = (token * NUM_HEADS + head) * HEAD_DIM
    tl.store(out_ptr + out_at[:, None] + dim[None, :], x.to(out_ptr.dtype.element_ty), mask=mask)


def write_kv_launch(
    k: Tensor,  # [num_tokens, kv_heads, head_dim]
    v: Tensor,  # [num_tokens, kv_heads, value_dim]
    pool: Pool,
    slots: Tensor,  # int64 [num_tokens]: block * block_size + offset; negative: a token that pads the batch
    rotation: Rotation | None = None,
) -> Launch:
    """Writes the tokens' slots of the pool, and of its scales; nothing else of it is touched or read.

    int8 rounds halves up. No two tokens may have one slot.
    """
    num_tokens, kv_heads, head_dim = k.shape
    value_dim, block_size = v.shape[2], pool.keys.shape[1]
    assert v.shape[:2] == (num_tokens, kv_heads), (k.shape, v.shape)
    assert pool.keys.shape[2:] == (kv_heads, head_dim), (pool.keys.shape, k.shape)
    assert pool.values.shape[2:] == (kv_heads, value_dim), (pool.values.shape, v.shape)
    assert k.stride(2) == v.stride(2) == pool.keys.stride(3) == pool.values.stride(3) == 1, "head_dim: contiguous"
    assert slots.shape == (num_tokens,), slots.shape
    assert slots.dtype == torch.int64, slots.dtype
    assert pool.is_quantised or pool.keys.dtype == k.dtype == v.dtype, (pool.keys.dtype, k.dtype, v.dtype)
    ks, vs = pool.scale_strides
    named = (("keys", pool.keys.stride()), ("values", pool.values.stride()), ("ks", ks), ("vs", vs))
    pools = {
        f"stride_{name}_{axis}": stride
        for name, strides in named
        for axis, stride in zip(("block", "slot", "head"), strides[:3], strict=True)
    }
    return Launch(
        write_kv_kernel,
        (num_tokens, -(-kv_heads // _HEADS_AT_ONCE)),
        {
            "k_ptr": k,
            "v_ptr": v,
            "keys_ptr": pool.keys,
            "values_ptr": pool.values,
            "key_scales_ptr": pool.key_scales,
            "value_scales_ptr": pool.value_scales,
            "slots_ptr": slots,
            "cos_ptr": None if rotation is None else rotation.cos,
            "sin_ptr": None if rotation is None else rotation.sin,
            "stride_k_token": k.stride(0),
            "stride_k_head": k.stride(1),
            "stride_v_token": v.stride(0),
            "stride_v_head": v.stride(1),
            **pools,
        },
        {
            "KV_HEADS": kv_heads,
            "HEAD_DIM": head_dim,
            "VALUE_DIM": value_dim,
            "HEAD_PAD": triton.next_power_of_2(head_dim),
            "VALUE_PAD": triton.next_power_of_2(value_dim),
            "HALF": 0 if rotation is None else _half(k, rotation),
            "BLOCK_SIZE": block_size,
            "HEADS": _HEADS_AT_ONCE,
            "MOST": _MOST.get(pool.keys.dtype, 0.0),
        },
    )


def rope_launch(
    x: Tensor,  # [num_tokens, num_heads, head_dim]
    rotation: Rotation,
    out: Tensor,  # [num_tokens, num_heads, head_dim], contiguous; may not share memory with x
) -> Launch:
    """`out` becomes x rotated: for the queries, whose pool is nobody's."""
    num_tokens, num_heads, head_dim = x.shape
    assert x.stride(2) == 1, x.stride()
    assert out.shape == x.shape, (out.shape, x.shape)
    assert out.is_contiguous(), out.stride()
    assert out.dtype == x.dtype, (out.dtype, x.dtype)
    assert out.untyped_storage().data_ptr() != x.untyped_storage().data_ptr(), "out must not be x"
    return Launch(
        rope_kernel,
        (num_tokens, -(-num_heads // _HEADS_AT_ONCE)),
        {
            "x_ptr": x,
            "out_ptr": out,
            "cos_ptr": rotation.cos,
            "sin_ptr": rotation.sin,
            "stride_token": x.stride(0),
            "stride_head": x.stride(1),
        },
        {
            "NUM_HEADS": num_heads,
            "HEAD_DIM": head_dim,
            "HEAD_PAD": triton.next_power_of_2(head_dim),
            "HALF": _half(x, rotation),
            "HEADS": _HEADS_AT_ONCE,
        },
    )


def _half(x: Tensor, rotation: Rotation) -> int:
    half = rotation.cos.shape[1]
    assert rotation.cos.shape == rotation.sin.shape == (len(x), half), (rotation.cos.shape, rotation.sin.shape)
    assert rotation.cos.dtype == rotation.sin.dtype == x.dtype, (rotation.cos.dtype, x.dtype)
    assert rotation.cos.is_contiguous(), rotation.cos.stride()
    assert rotation.sin.is_contiguous(), rotation.sin.stride()
    assert 2 * half <= x.shape[2], (half, x.shape)
    return half
