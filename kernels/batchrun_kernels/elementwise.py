"""What a model does between its matrix products, in C on float32, and the same stated in plain torch."""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from batchrun_kernels import native

Activation = Literal["silu", "gelu_tanh"]


def rms_norm(
    x: Tensor,  # float32 [..., n]
    weight: Tensor,  # float32 [n]
    eps: float,
) -> Tensor:
    """float32 [..., n]: x / sqrt(mean of squares + eps) * weight."""
    assert x.dtype == weight.dtype == torch.float32, f"{x.dtype}, {weight.dtype}"
    assert weight.shape == x.shape[-1:], f"a weight of {tuple(weight.shape)} for rows of {x.shape[-1]}"
    assert weight.is_contiguous(), "a weight is contiguous"
    x = x.contiguous()
    y = torch.empty_like(x)
    rows, n = _rows(x)
    native.needed().batchrun_rms_norm(x.data_ptr(), None, weight.data_ptr(), eps, y.data_ptr(), rows, n)
    return y


def add_rms_norm(
    x: Tensor,  # float32 [..., n]
    total: Tensor,  # float32 [..., n], contiguous; becomes total + x
    weight: Tensor,  # float32 [n]
    eps: float,
) -> Tensor:
    """float32 [..., n]: `rms_norm` of the new total."""
    assert x.dtype == total.dtype == weight.dtype == torch.float32, f"{x.dtype}, {total.dtype}, {weight.dtype}"
    assert x.shape == total.shape, f"{tuple(x.shape)} added to {tuple(total.shape)}"
    assert weight.shape == x.shape[-1:], f"a weight of {tuple(weight.shape)} for rows of {x.shape[-1]}"
    assert weight.is_contiguous(), "a weight is contiguous"
    assert total.is_contiguous(), "the total is contiguous"
    x = x.contiguous()
    y = torch.empty_like(total)
    rows, n = _rows(x)
    arguments = x.data_ptr(), total.data_ptr(), weight.data_ptr(), eps, y.data_ptr(), rows, n
    native.needed().batchrun_rms_norm(*arguments)
    return y


def reference_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The oracle: float64."""
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()


def glu(
    gate_up: Tensor,  # float32 [..., 2n], a row's n gates before its n ups
    activation: Activation,
) -> Tensor:
    """float32 [..., n]: activation(gate) * up."""
    assert gate_up.dtype == torch.float32, gate_up.dtype
    assert gate_up.shape[-1] % 2 == 0, f"{gate_up.shape[-1]} columns are no gates and ups"
    gate_up = gate_up.contiguous()
    y = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    rows, n = _rows(y)
    native.needed().batchrun_glu(gate_up.data_ptr(), y.data_ptr(), rows, n, activation == "gelu_tanh")
    return y


def reference_glu(gate_up: Tensor, activation: Activation) -> Tensor:
    """The oracle, in the dtype it is given."""
    gate, up = gate_up.chunk(2, dim=-1)
    return activated(gate, activation) * up


def activated(gate: Tensor, activation: Activation) -> Tensor:
    """activation(gate), in torch."""
    return functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")


def rope(
    x: Tensor,  # float32 [num_tokens, heads, dim], any strides but the last
    cos: Tensor,  # float32 [num_tokens, turned], turned even and at most dim
    sin: Tensor,  # float32 [num_tokens, turned]
) -> Tensor:
    """float32 [num_tokens, heads, dim], contiguous: x * cos + rotate_half(x) * sin, the halves of a head as pairs.

    Of a head only the first `turned` numbers are turned; the others stay.
    """
    num_tokens, heads, dim = x.shape
    assert x.dtype == cos.dtype == sin.dtype == torch.float32, f"{x.dtype}, {cos.dtype}, {sin.dtype}"
    turned = cos.shape[-1]
    assert cos.shape == sin.shape == (num_tokens, turned), f"angles {tuple(cos.shape)} for {tuple(x.shape)}"
    assert turned <= dim, f"angles {tuple(cos.shape)} for {tuple(x.shape)}"
    assert turned % 2 == 0, f"{turned} numbers of a head have no halves"
    x = x if x.stride(2) == 1 else x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    y = x.new_empty(num_tokens, heads, dim)
    native.needed().batchrun_rope(
        x.data_ptr(),
        x.stride(0),
        x.stride(1),
        cos.data_ptr(),
        sin.data_ptr(),
        y.data_ptr(),
        num_tokens,
        heads,
        dim,
        turned,
    )
    return y


def reference_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The oracle, in the dtype it is given; `cos` and `sin` fit the first part of x by broadcasting."""
    x, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    low, high = x.chunk(2, dim=-1)
    return torch.cat((x * cos + torch.cat((-high, low), dim=-1) * sin, rest), dim=-1)


def _rows(x: Tensor) -> tuple[int, int]:
    n = x.shape[-1]
    return x.numel() // n, n
