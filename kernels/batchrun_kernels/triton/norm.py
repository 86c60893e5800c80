"""RMSNorm with the residual stream's addition before it, rounding where transformers' modules do."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchrun_kernels.triton.launch import Launch


@triton.jit
def add_rms_norm_kernel(
    x_ptr: tl.tensor,  # [num_tokens, SIZE], strided
    residual_ptr: tl.tensor,  # [num_tokens, SIZE], contiguous, or None
    weight_ptr: tl.tensor,  # [SIZE]
    out_ptr: tl.tensor,  # [num_tokens, SIZE], contiguous
    eps: tl.tensor,
    stride_x: tl.tensor,
    SIZE: tl.constexpr,
    PAD: tl.constexpr,
    PLUS_ONE: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PAD)
    mask = at < SIZE
    dtype = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + token * stride_x + at, mask=mask, other=0.0).to(tl.float32)  # [PAD]
    if residual_ptr is not None:
        x += tl.load(residual_ptr + token * SIZE + at, mask=mask, other=0.0).to(tl.float32)
        x = x.to(dtype).to(tl.float32)
        tl.store(residual_ptr + token * SIZE + at, x.to(dtype), mask=mask)
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)
    weight = tl.load(weight_ptr + at, mask=mask, other=0.0).to(tl.float32)
    normed = normed * (1.0 + weight) if PLUS_ONE else normed.to(dtype).to(tl.float32) * weight
    tl.store(out_ptr + token * SIZE + at, normed.to(dtype), mask=mask)


def add_rms_norm_launch(
    x: Tensor,  # [num_tokens, size], last stride 1
    residual: Tensor | None,  # [num_tokens, size], contiguous; becomes residual + x
    weight: Tensor,  # [size]
    out: Tensor,  # [num_tokens, size], contiguous; may be x
    eps: float,
    *,
    plus_one: bool = False,
) -> Launch:
    """`out` becomes the norm of residual + x, times the weight; `plus_one`: times 1 + weight, rounded only then."""
    num_tokens, size = x.shape
    assert x.stride(1) == 1, x.stride()
    for one in (out, x if residual is None else residual):
        assert one.shape == x.shape, (one.shape, x.shape)
        assert one.dtype == x.dtype, (one.dtype, x.dtype)
    assert out.is_contiguous(), out.stride()
    assert residual is None or residual.is_contiguous(), "the residual must be contiguous"
    assert weight.shape == (size,), (weight.shape, size)
    assert weight.is_contiguous(), weight.stride()
    assert weight.dtype in (x.dtype, torch.float32), (weight.dtype, x.dtype)
    pad = triton.next_power_of_2(size)
    return Launch(
        add_rms_norm_kernel,
        (num_tokens,),
        {
            "x_ptr": x,
            "residual_ptr": residual,
            "weight_ptr": weight,
            "out_ptr": out,
            "eps": float(eps),
            "stride_x": x.stride(0),
        },
        {"SIZE": size, "PAD": pad, "PLUS_ONE": plus_one},
        num_warps=min(16, max(1, pad // 512)),
    )
