"""Blocks of all layers, from place to place in one launch: pool to staging, staging to pool, or within a pool."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchrun_kernels.triton.launch import Launch

# int32 words a program copies.
_WORDS = 1024


@triton.jit
def copy_blocks_kernel(
    source_ptr: tl.tensor,  # int32 [num_layers, num_source_blocks, num_words], words contiguous
    target_ptr: tl.tensor,  # int32 [num_layers, num_target_blocks, num_words], words contiguous
    source_ids_ptr: tl.tensor,  # int32 [num_ids], or None: 0, 1, 2 ...
    target_ids_ptr: tl.tensor,  # int32 [num_ids], or None: 0, 1, 2 ...
    num_words: tl.tensor,
    stride_source_layer: tl.tensor,
    stride_source_block: tl.tensor,
    stride_target_layer: tl.tensor,
    stride_target_block: tl.tensor,
    WORDS: tl.constexpr,
) -> None:
    source = tl.program_id(0)
    target = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    if source_ids_ptr is not None:
        source = tl.load(source_ids_ptr + source)
    if target_ids_ptr is not None:
        target = tl.load(target_ids_ptr + target)
    if (source < 0) | (target < 0):
        return
    word = tl.program_id(2) * WORDS + tl.arange(0, WORDS)
    mask = word < num_words
    source_at = layer * stride_source_layer + source.to(tl.int64) * stride_source_block
    target_at = layer * stride_target_layer + target.to(tl.int64) * stride_target_block
    tl.store(target_ptr + target_at + word, tl.load(source_ptr + source_at + word, mask=mask), mask=mask)


def copy_blocks_launch(
    source: Tensor,  # [num_layers, num_source_blocks, ...], a block contiguous and of whole int32 words
    target: Tensor,  # [num_layers, num_target_blocks, ...], as the source
    source_ids: Tensor | None,  # int32 [num_ids]; None: the blocks in their order; negative: pads, not copied
    target_ids: Tensor | None,  # int32 [num_ids]; None: the blocks in their order
) -> Launch:
    """Block `target_ids[i]` becomes what block `source_ids[i]` was, bit for bit, in every layer.

    Within one pool, no block may be both a source and a target: the order of the copies is not defined.
    """
    from_, to = _words(source), _words(target)
    assert from_.shape[0] == to.shape[0], (source.shape, target.shape)
    assert from_.shape[2] == to.shape[2], (source.shape, target.shape)
    ids = [one for one in (source_ids, target_ids) if one is not None]
    assert ids, "copy a whole pool with Tensor.copy_"
    for one in ids:
        assert one.dtype == torch.int32, one.dtype
        assert one.shape == ids[0].shape, (one.shape, ids[0].shape)
        assert one.is_contiguous(), one.stride()
    num_words = from_.shape[2]
    return Launch(
        copy_blocks_kernel,
        (len(ids[0]), from_.shape[0], -(-num_words // _WORDS)),
        {
            "source_ptr": from_,
            "target_ptr": to,
            "source_ids_ptr": source_ids,
            "target_ids_ptr": target_ids,
            "num_words": num_words,
            "stride_source_layer": from_.stride(0),
            "stride_source_block": from_.stride(1),
            "stride_target_layer": to.stride(0),
            "stride_target_block": to.stride(1),
        },
        {"WORDS": _WORDS},
    )


def _words(blocks: Tensor) -> Tensor:
    """int32 [num_layers, num_blocks, num_words], the same memory."""
    assert blocks[0, 0].is_contiguous(), f"blocks must be contiguous: {blocks.stride()}"
    return blocks.flatten(2).view(torch.int32)
