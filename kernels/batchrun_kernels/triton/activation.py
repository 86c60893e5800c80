"""The activation of the gate, times up, from the one product that holds both."""

import triton
import triton.language as tl
from torch import Tensor

from batchrun_kernels.elementwise import Activation
from batchrun_kernels.triton.launch import Launch

_COLUMNS = 1024


@triton.jit
def glu_kernel(
    gate_up_ptr: tl.tensor,  # [num_tokens, 2 * size], strided
    out_ptr: tl.tensor,  # [num_tokens, size], contiguous
    size: tl.tensor,
    stride_token: tl.tensor,
    COLUMNS: tl.constexpr,
    IS_GELU: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < size
    dtype = out_ptr.dtype.element_ty
    at = token * stride_token + column
    gate = tl.load(gate_up_ptr + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + at + size, mask=mask, other=0.0).to(tl.float32)
    # silu(g) is g / (1 + exp(-g)), and gelu by tanh is g / (1 + exp(-2z)) with z what is in its tanh.
    z = gate * (1.0 + 0.044715 * gate * gate) * 1.5957691216 if IS_GELU else gate
    # exp of -80 and below: the sigmoid is 1 to float32, exp of 80: the product is below what any dtype here resolves.
    active = gate / (1.0 + tl.exp(-tl.maximum(z, -80.0)))
    tl.store(out_ptr + token * size + column, (active.to(dtype).to(tl.float32) * up).to(dtype), mask=mask)


def glu_launch(
    gate_up: Tensor,  # [num_tokens, 2 * size], last stride 1: the gate, then up
    out: Tensor,  # [num_tokens, size], contiguous
    activation: Activation,
) -> Launch:
    """`out` becomes activation(gate) * up, the first factor rounded to the dtype before the product."""
    num_tokens, size = out.shape
    assert gate_up.shape == (num_tokens, 2 * size), (gate_up.shape, out.shape)
    assert gate_up.stride(1) == 1, gate_up.stride()
    assert out.is_contiguous(), out.stride()
    assert out.dtype == gate_up.dtype, (out.dtype, gate_up.dtype)
    return Launch(
        glu_kernel,
        (num_tokens, -(-size // _COLUMNS)),
        {"gate_up_ptr": gate_up, "out_ptr": out, "size": size, "stride_token": gate_up.stride(0)},
        {"COLUMNS": _COLUMNS, "IS_GELU": activation == "gelu_tanh"},
    )
