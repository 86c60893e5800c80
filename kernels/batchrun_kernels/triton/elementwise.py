"""What a model does between its matrix products, by the Triton kernels; see `batchrun_kernels.elementwise`."""

from torch import Tensor

from batchrun_kernels.elementwise import Activation
from batchrun_kernels.triton.activation import glu_launch
from batchrun_kernels.triton.norm import add_rms_norm_launch
from batchrun_kernels.triton.write_kv import Rotation, rope_launch


def rms_norm(
    x: Tensor,  # [..., n]
    weight: Tensor,  # [n], float32 or x's dtype
    eps: float,
) -> Tensor:
    """[..., n], in x's dtype: x / sqrt(mean of squares + eps) * weight."""
    rows = x.reshape(-1, x.shape[-1])
    out = rows.new_empty(rows.shape)
    add_rms_norm_launch(rows, None, weight, out, eps).run()
    return out.view(x.shape)


def add_rms_norm(
    x: Tensor,  # [..., n]
    total: Tensor,  # [..., n], contiguous; becomes total + x
    weight: Tensor,  # [n], float32 or x's dtype
    eps: float,
) -> Tensor:
    """[..., n], in x's dtype: `rms_norm` of the new total."""
    assert total.is_contiguous(), "the total is contiguous"
    rows = x.reshape(-1, x.shape[-1])
    out = rows.new_empty(rows.shape)
    add_rms_norm_launch(rows, total.view(rows.shape), weight, out, eps).run()
    return out.view(x.shape)


def glu(
    gate_up: Tensor,  # [..., 2n], a row's n gates before its n ups
    activation: Activation,
) -> Tensor:
    """[..., n]: activation(gate) * up."""
    rows = gate_up.reshape(-1, gate_up.shape[-1])
    out = rows.new_empty(len(rows), rows.shape[1] // 2)
    glu_launch(rows, out, activation).run()
    return out.view(*gate_up.shape[:-1], out.shape[1])


def rope(
    x: Tensor,  # [num_tokens, heads, dim], any strides but the last
    cos: Tensor,  # [num_tokens, turned], the second half as the first
    sin: Tensor,  # [num_tokens, turned], the second half as the first
) -> Tensor:
    """[num_tokens, heads, dim], contiguous: x * cos + rotate_half(x) * sin, the halves of a head as pairs.

    Of a head only the first `turned` numbers are turned; the others stay.
    """
    half = cos.shape[1] // 2
    x = x if x.stride(2) == 1 else x.contiguous()
    out = x.new_empty(x.shape)
    rotation = Rotation(cos[:, :half].to(x.dtype).contiguous(), sin[:, :half].to(x.dtype).contiguous())
    rope_launch(x, rotation, out).run()
    return out
