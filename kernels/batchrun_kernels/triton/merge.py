"""Partial results to final ones: the mean of a row's partials, weighed by their mass, and the sink's mass with them."""

import triton
import triton.language as tl
from torch import Tensor

from batchrun_kernels.triton.attend import LOG2E
from batchrun_kernels.triton.launch import Launch
from batchrun_kernels.triton.lists import MERGED, DeviceLists
from batchrun_kernels.triton.pool import Partials

_HEADS_AT_ONCE = 8


@triton.jit
def merge_kernel(
    partial_ptr: tl.tensor,  # float32 [num_slots, NUM_HEADS, VALUE_DIM], contiguous
    lse_ptr: tl.tensor,  # float32 [num_slots, NUM_HEADS], contiguous, base 2
    sinks_ptr: tl.tensor,  # [NUM_HEADS], or None
    out_ptr: tl.tensor,  # [num_tokens, NUM_HEADS, VALUE_DIM], contiguous
    counts_ptr: tl.tensor,  # int32 [4]
    tokens_ptr: tl.tensor,  # int32 [bucket]
    starts_ptr: tl.tensor,  # int32 [bucket + 1]
    slots_ptr: tl.tensor,  # int32 [bucket]
    COUNT: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    number = tl.program_id(0)
    if number >= tl.load(counts_ptr + COUNT):
        return
    token = tl.load(tokens_ptr + number).to(tl.int64)
    first = tl.load(starts_ptr + number)
    end = tl.load(starts_ptr + number + 1)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head = head < NUM_HEADS  # [HEADS]
    dim = tl.arange(0, VALUE_PAD)
    mask = is_head[:, None] & (dim < VALUE_DIM)[None, :]  # [HEADS, VALUE_PAD]
    best = tl.full([HEADS], float("-inf"), tl.float32)
    if sinks_ptr is not None:
        best = tl.load(sinks_ptr + head, mask=is_head, other=0.0).to(tl.float32) * LOG2E
    # The sink has its mass and no value; without one, nothing has been weighed yet.
    total = tl.where(best > float("-inf"), 1.0, 0.0)
    acc = tl.zeros([HEADS, VALUE_PAD], tl.float32)
    for at in range(first, end):
        row = tl.load(slots_ptr + at).to(tl.int64) * NUM_HEADS + head
        lse = tl.load(lse_ptr + row, mask=is_head, other=float("-inf"))
        part = tl.load(partial_ptr + row[:, None] * VALUE_DIM + dim[None, :], mask=mask, other=0.0)
        highest = tl.maximum(best, lse)
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        decay = tl.exp2(best - shift)
        weight = tl.exp2(lse - shift)
        total = total * decay + weight
        acc = acc * decay[:, None] + part * weight[:, None]
        best = highest
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    out_at = (token * NUM_HEADS + head) * VALUE_DIM
    tl.store(out_ptr + out_at[:, None] + dim[None, :], result.to(out_ptr.dtype.element_ty), mask=mask)


def merge_launch(
    partials: Partials,
    lists: DeviceLists,
    sinks: Tensor | None,  # [num_heads]
    out: Tensor,  # [num_tokens, num_heads, value_dim]
) -> Launch:
    """Fills the rows of `out` that have partials; to be run after all launches that write them."""
    _, num_heads, value_dim = out.shape
    partials.check(lists.num_slots, num_heads, value_dim)
    assert out.is_contiguous(), out.stride()
    assert sinks is None or (sinks.shape == (num_heads,) and sinks.is_contiguous()), sinks
    return Launch(
        merge_kernel,
        (len(lists.merged_tokens), -(-num_heads // _HEADS_AT_ONCE)),
        {
            "partial_ptr": partials.values,
            "lse_ptr": partials.lse,
            "sinks_ptr": sinks,
            "out_ptr": out,
            "counts_ptr": lists.counts,
            "tokens_ptr": lists.merged_tokens,
            "starts_ptr": lists.merged_starts,
            "slots_ptr": lists.merged_slots,
        },
        {
            "COUNT": MERGED,
            "NUM_HEADS": num_heads,
            "VALUE_DIM": value_dim,
            "VALUE_PAD": triton.next_power_of_2(value_dim),
            "HEADS": _HEADS_AT_ONCE,
        },
    )
