"""The fused layers equal the modules they stand for, with the same roundings on the way."""

import math

import pytest
import torch
from torch import Tensor

from batchrun_kernels.elementwise import Activation, activated
from batchrun_kernels.triton.activation import glu_launch
from batchrun_kernels.triton.norm import add_rms_norm_launch

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Sums run in another order than torch's: an error of float32, or a rounding of a half that falls the other way.
RTOL = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def rms_norm(x: Tensor, weight: Tensor, eps: float, plus_one: bool) -> Tensor:
    """LlamaRMSNorm, or Gemma's."""
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return (normed * (1.0 + weight.float())).to(x.dtype) if plus_one else weight * normed.to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("adds", [False, True])
def test_add_rms_norm(device: torch.device, dtype: torch.dtype, plus_one: bool, adds: bool) -> None:
    random = torch.Generator().manual_seed(0)
    x, residual = torch.randn(2, 5, 111, generator=random).to(dtype).to(device)
    weight = torch.randn(111, generator=random).to(dtype).to(device)
    strided = torch.full((5, 130), math.nan, dtype=dtype, device=device)[:, :111].copy_(x)
    total = x + residual if adds else x
    out = torch.full_like(x, math.nan)
    add_rms_norm_launch(strided, residual if adds else None, weight, out, 1e-5, plus_one=plus_one).run()
    torch.testing.assert_close(out, rms_norm(total, weight, 1e-5, plus_one), rtol=RTOL[dtype], atol=0)
    if adds:
        assert torch.equal(residual, total)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [63, 1029])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_glu(device: torch.device, dtype: torch.dtype, size: int, activation: Activation) -> None:
    gate_up = torch.randn(3, 2 * size, generator=torch.Generator().manual_seed(0)).mul(4).to(dtype).to(device)
    gate_up[0, :2] = torch.tensor([-200.0, 200.0])
    out = torch.full((3, size), math.nan, dtype=dtype, device=device)
    glu_launch(gate_up, out, activation).run()
    gate, up = gate_up.chunk(2, dim=1)
    # Torch's gelu is wrong by that much where it nearly vanishes: 1 + tanh loses all digits.
    atol = 1e-30 if activation == "silu" else 2e-6
    # Where torch's exp rounds otherwise than numpy's: one unit of the activation, and one of the product.
    torch.testing.assert_close(out, activated(gate, activation) * up, rtol=2 * RTOL[dtype], atol=atol)
