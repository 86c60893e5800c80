"""Attention of one kind of tile: each program does one item of a work list for one kv head.

Row m of a tile is query token m // GROUP of the item and the kv head's query head m % GROUP. A kv head of more query
heads than a narrow tile has rows is SPLIT programs, each for an equal part of them. Scores and sums are float32 in
base 2. The mask is `seen <= position` and the window: nothing else tells a chunk from a decode row. Tiles of keys begin
at multiples of their length; an item's first ones may be runs of consecutive blocks, of which each is one box.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchrun_kernels.contract import Mask
from batchrun_kernels.triton.boxes import boxes
from batchrun_kernels.triton.configs import Kind, Tiles
from batchrun_kernels.triton.launch import Launch
from batchrun_kernels.triton.lists import NARROW, WIDE, DeviceLists
from batchrun_kernels.triton.pool import Partials, Pool

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def tanh(x: tl.tensor) -> tl.tensor:
    """Right to an absolute 1e-7; beyond 10, float32 has nothing but 1."""
    x = tl.minimum(tl.maximum(x, -10.0), 10.0)
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def weighed(
    scores: tl.tensor,  # float32 [ROWS, TOKENS]
    best: tl.tensor,  # float32 [ROWS], of all tiles before
    total: tl.tensor,  # float32 [ROWS], of all tiles before
    seen: tl.tensor,  # [TOKENS]
    is_seen: tl.tensor,  # [TOKENS]
    position: tl.tensor,  # [ROWS]
    softcap: tl.tensor,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
) -> tl.tensor:
    """The tile's weights, how what was summed before decays, and best and total with the tile."""
    if HAS_SOFTCAP:
        scores = softcap * tanh(scores / softcap)
    scores *= LOG2E
    visible = is_seen[None, :] & (seen[None, :] <= position[:, None])
    if WINDOW > 0:
        visible = visible & (seen[None, :] > position[:, None] - WINDOW)
    scores = tl.where(visible, scores, float("-inf"))
    highest = tl.maximum(best, tl.max(scores, 1))
    # A row that has seen nothing yet must not compute inf - inf.
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(best - shift)
    return weights, decay, highest, total * decay + tl.sum(weights, 1)


@triton.jit
def attend_kernel(
    q_ptr: tl.tensor,  # [num_tokens, NUM_HEADS, HEAD_DIM], strided
    k_ptr: tl.tensor,  # [num_blocks, BLOCK_SIZE, kv_heads, HEAD_DIM], strided
    v_ptr: tl.tensor,  # [num_blocks, BLOCK_SIZE, kv_heads, VALUE_DIM], strided
    k_box: tl.tensor_descriptor,  # of TOKENS keys in consecutive blocks: [blocks, 1, BLOCK_SIZE, HEAD_PAD]; or None
    v_box: tl.tensor_descriptor,  # of TOKENS values in consecutive blocks: [blocks, 1, BLOCK_SIZE, VALUE_PAD]; or None
    k_scale_ptr: tl.tensor,  # float32 [num_blocks, BLOCK_SIZE, kv_heads], strided, or None
    v_scale_ptr: tl.tensor,  # float32 [num_blocks, BLOCK_SIZE, kv_heads], strided, or None
    sinks_ptr: tl.tensor,  # [NUM_HEADS], or None
    out_ptr: tl.tensor,  # [num_tokens, NUM_HEADS, VALUE_DIM], contiguous
    partial_ptr: tl.tensor,  # float32 [num_slots, NUM_HEADS, VALUE_DIM], contiguous
    lse_ptr: tl.tensor,  # float32 [num_slots, NUM_HEADS], contiguous, base 2
    counts_ptr: tl.tensor,  # int32 [4]
    items_ptr: tl.tensor,  # int32 [bucket, 7]
    block_ids_ptr: tl.tensor,  # int32 [num_ids]
    positions_ptr: tl.tensor,  # int32 [num_tokens]
    scale: tl.tensor,
    softcap: tl.tensor,
    stride_q_token: tl.tensor,
    stride_q_head: tl.tensor,
    stride_k_block: tl.tensor,
    stride_k_slot: tl.tensor,
    stride_k_head: tl.tensor,
    stride_v_block: tl.tensor,
    stride_v_slot: tl.tensor,
    stride_v_head: tl.tensor,
    stride_ks_block: tl.tensor,
    stride_ks_slot: tl.tensor,
    stride_ks_head: tl.tensor,
    stride_vs_block: tl.tensor,
    stride_vs_slot: tl.tensor,
    stride_vs_head: tl.tensor,
    COUNT: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
) -> None:
    number = tl.program_id(0)
    kv_head = tl.program_id(1) // SPLIT
    if number >= tl.load(counts_ptr + COUNT):
        return
    q_lo = tl.load(items_ptr + number * 7)
    q_len = tl.load(items_ptr + number * 7 + 1)
    offset = tl.load(items_ptr + number * 7 + 2)
    kv_lo = tl.load(items_ptr + number * 7 + 3)
    kv_hi = tl.load(items_ptr + number * 7 + 4)
    slot = tl.load(items_ptr + number * 7 + 5)

    row = tl.arange(0, ROWS)
    is_row = row < q_len * GROUP  # [ROWS]
    token = q_lo + row // GROUP
    head = tl.program_id(1) * GROUP + row % GROUP
    k_dim = tl.arange(0, HEAD_PAD)
    v_dim = tl.arange(0, VALUE_PAD)
    # Rows beyond the item stand before every position: they see nothing.
    position = tl.load(positions_ptr + token, mask=is_row, other=-1)
    q_at = token.to(tl.int64) * stride_q_token + head * stride_q_head
    q_mask = is_row[:, None] & (k_dim < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + q_at[:, None] + k_dim[None, :], mask=q_mask, other=0.0)  # [ROWS, HEAD_PAD]

    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, VALUE_PAD], tl.float32)
    begin = kv_lo // TOKENS * TOKENS
    if k_box is not None:
        runs_hi = tl.maximum(begin, tl.load(items_ptr + number * 7 + 6))
        # A run's first block is known one tile ahead: then boxes can be fetched ahead too.
        run = tl.load(block_ids_ptr + offset + begin // BLOCK_SIZE)
        for start in range(begin, runs_hi, TOKENS):
            seen = start + tl.arange(0, TOKENS)
            k = k_box.load([run, kv_head, 0, 0]).reshape(TOKENS, HEAD_PAD)
            scores = tl.dot(q, k.T, input_precision="ieee") * scale  # [ROWS, TOKENS]
            weights, decay, best, total = weighed(
                scores, best, total, seen, seen >= kv_lo, position, softcap, WINDOW, HAS_SOFTCAP
            )
            # What the item does not see of these is the sequence's own: finite, and weighs nothing.
            v = v_box.load([run, kv_head, 0, 0]).reshape(TOKENS, VALUE_PAD)
            ahead = start + TOKENS
            run = tl.load(block_ids_ptr + offset + ahead // BLOCK_SIZE, mask=ahead < runs_hi, other=0)
            acc = tl.dot(weights.to(q.dtype), v, acc * decay[:, None], input_precision="ieee")
        begin = runs_hi
    for start in range(begin, kv_hi, TOKENS):
        seen = start + tl.arange(0, TOKENS)
        is_seen = (seen >= kv_lo) & (seen < kv_hi)  # [TOKENS]
        block = tl.load(block_ids_ptr + offset + seen // BLOCK_SIZE, mask=is_seen, other=0).to(tl.int64)
        within = seen % BLOCK_SIZE
        k_at = block * stride_k_block + within * stride_k_slot + kv_head * stride_k_head
        v_at = block * stride_v_block + within * stride_v_slot + kv_head * stride_v_head
        k_mask = is_seen[None, :] if HEAD_PAD == HEAD_DIM else is_seen[None, :] & (k_dim < HEAD_DIM)[:, None]
        v_mask = is_seen[:, None] if VALUE_PAD == VALUE_DIM else is_seen[:, None] & (v_dim < VALUE_DIM)[None, :]
        k = tl.load(k_ptr + k_at[None, :] + k_dim[:, None], mask=k_mask, other=0.0).to(q.dtype)  # [HEAD_PAD, TOKENS]
        scores = tl.dot(q, k, input_precision="ieee") * scale  # [ROWS, TOKENS]
        if k_scale_ptr is not None:
            ks_at = block * stride_ks_block + within * stride_ks_slot + kv_head * stride_ks_head
            scores *= tl.load(k_scale_ptr + ks_at, mask=is_seen, other=0.0)[None, :]
        weights, decay, best, total = weighed(
            scores, best, total, seen, is_seen, position, softcap, WINDOW, HAS_SOFTCAP
        )
        if v_scale_ptr is not None:
            vs_at = block * stride_vs_block + within * stride_vs_slot + kv_head * stride_vs_head
            weights *= tl.load(v_scale_ptr + vs_at, mask=is_seen, other=0.0)[None, :]
        v = tl.load(v_ptr + v_at[:, None] + v_dim[None, :], mask=v_mask, other=0.0).to(q.dtype)  # [TOKENS, VALUE_PAD]
        acc = tl.dot(weights.to(q.dtype), v, acc * decay[:, None], input_precision="ieee")

    out_mask = is_row[:, None] & (v_dim < VALUE_DIM)[None, :]
    if slot < 0:
        mass = total
        kept = acc
        if sinks_ptr is not None:
            sink = tl.load(sinks_ptr + head, mask=is_row, other=0.0).to(tl.float32) * LOG2E
            top = tl.maximum(best, sink)
            mass = total * tl.exp2(best - top) + tl.exp2(sink - top)
            kept = acc * tl.exp2(best - top)[:, None]
        result = kept / tl.where(mass > 0.0, mass, 1.0)[:, None]
        out_at = (token.to(tl.int64) * NUM_HEADS + head) * VALUE_DIM
        tl.store(out_ptr + out_at[:, None] + v_dim[None, :], result.to(out_ptr.dtype.element_ty), mask=out_mask)
    else:
        divisor = tl.where(total > 0.0, total, 1.0)
        part_at = (slot + row // GROUP).to(tl.int64) * NUM_HEADS + head
        lse = tl.where(total > 0.0, best + tl.log2(divisor), float("-inf"))
        tl.store(lse_ptr + part_at, lse, mask=is_row)
        tl.store(partial_ptr + part_at[:, None] * VALUE_DIM + v_dim[None, :], acc / divisor[:, None], mask=out_mask)


def attend_launch(
    q: Tensor,  # [num_tokens, num_heads, head_dim]
    pool: Pool,
    lists: DeviceLists,
    mask: Mask,
    out: Tensor,  # [num_tokens, num_heads, value_dim], q's dtype; final results
    partials: Partials,
    kind: Kind,
    tiles: Tiles,
) -> Launch:
    """Fills the rows of `out`, and of `partials`, that the list's items of one kind own.

    Runs are fetched in boxes where the table says so and the pool allows it.
    """
    num_tokens, num_heads, head_dim = q.shape
    block_size, kv_heads, value_dim = pool.values.shape[1:]
    assert pool.keys.shape[1:] == (block_size, kv_heads, head_dim), (pool.keys.shape, pool.values.shape, q.shape)
    assert num_heads % kv_heads == 0, (num_heads, kv_heads)
    assert q.stride(2) == pool.keys.stride(3) == pool.values.stride(3) == 1, "head_dim must be contiguous"
    assert out.shape == (num_tokens, num_heads, value_dim), (out.shape, q.shape, value_dim)
    assert out.is_contiguous(), out.stride()
    assert out.dtype == q.dtype, (out.dtype, q.dtype)
    assert pool.is_quantised or pool.keys.dtype == q.dtype, (pool.keys.dtype, q.dtype)
    partials.check(lists.num_slots, num_heads, value_dim)
    assert mask.sinks is None or (mask.sinks.shape == (num_heads,) and mask.sinks.is_contiguous()), mask.sinks
    config = tiles.of(kind)
    group = tiles.heads_together(num_heads // kv_heads)
    split = num_heads // kv_heads // group
    items = lists.wide if kind == "wide" else lists.narrow
    assert lists.shape.run_len in (0, config.tokens), f"runs of {lists.shape.run_len} in tiles of {config.tokens} keys"
    found = boxes(pool, config.tokens) if lists.shape.run_len and config.reads_runs else None
    key_strides, value_strides = pool.scale_strides
    return Launch(
        attend_kernel,
        (len(items), kv_heads * split),
        {
            "q_ptr": q,
            "k_ptr": pool.keys,
            "v_ptr": pool.values,
            "k_box": None if found is None else found.keys,
            "v_box": None if found is None else found.values,
            "k_scale_ptr": pool.key_scales,
            "v_scale_ptr": pool.value_scales,
            "sinks_ptr": mask.sinks,
            "out_ptr": out,
            "partial_ptr": partials.values,
            "lse_ptr": partials.lse,
            "counts_ptr": lists.counts,
            "items_ptr": items,
            "block_ids_ptr": lists.block_ids,
            "positions_ptr": lists.positions,
            "scale": float(mask.scale),
            "softcap": float(mask.softcap or 0.0),
            "stride_q_token": q.stride(0),
            "stride_q_head": q.stride(1),
            **dict(zip(("stride_k_block", "stride_k_slot", "stride_k_head"), pool.keys.stride()[:3], strict=True)),
            **dict(zip(("stride_v_block", "stride_v_slot", "stride_v_head"), pool.values.stride()[:3], strict=True)),
            **dict(zip(("stride_ks_block", "stride_ks_slot", "stride_ks_head"), key_strides, strict=True)),
            **dict(zip(("stride_vs_block", "stride_vs_slot", "stride_vs_head"), value_strides, strict=True)),
        },
        {
            "COUNT": WIDE if kind == "wide" else NARROW,
            "NUM_HEADS": num_heads,
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "VALUE_DIM": value_dim,
            "HEAD_PAD": max(16, triton.next_power_of_2(head_dim)),
            "VALUE_PAD": max(16, triton.next_power_of_2(value_dim)),
            "BLOCK_SIZE": block_size,
            "SPLIT": split,
            "ROWS": config.rows,
            "TOKENS": config.tokens,
            "WINDOW": mask.window or 0,
            "HAS_SOFTCAP": mask.softcap is not None,
        },
        config.num_warps,
        config.num_stages,
    )


def empty_partials(lists: DeviceLists, q: Tensor, value_dim: int) -> Partials:
    """Room for a step's partial results; what no item writes is never read."""
    return Partials(
        torch.empty(lists.num_slots, q.shape[1], value_dim, dtype=torch.float32, device=q.device),
        torch.empty(lists.num_slots, q.shape[1], dtype=torch.float32, device=q.device),
    )
