"""The row-wise C kernels equal plain torch in float64, on sizes that fit no vector and beside NaN in memory."""

import ctypes
import math

import pytest
import torch
from torch import Tensor

from batchrun_kernels import elementwise
from batchrun_kernels.elementwise import Activation

pytestmark = pytest.mark.usefixtures("two_threads")


def rows(num_rows: int, n: int, *, scale: float = 1.0, seed: int = 0) -> Tensor:
    """[num_rows, n], NaN before and behind it in memory."""
    x = torch.full((num_rows + 2, n), math.nan)[1:-1]
    return x.copy_(torch.randn(num_rows, n, generator=torch.Generator().manual_seed(seed)) * scale)


@pytest.mark.parametrize("n", [1, 7, 8, 63, 576])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_rms_norm_equals_the_reference(library: ctypes.CDLL, n: int, scale: float) -> None:
    x, weight = rows(41, n, scale=scale), torch.randn(n, generator=torch.Generator().manual_seed(1))
    expected = elementwise.reference_rms_norm(x, weight, 1e-6)
    # Values of up to sqrt(n) * |weight|, a few float32 roundings each.
    torch.testing.assert_close(elementwise.rms_norm(x, weight, 1e-6).double(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("n", [1, 7, 8, 63, 576])
def test_add_rms_norm_is_an_addition_and_a_norm(library: ctypes.CDLL, n: int) -> None:
    x, total, weight = rows(41, n), rows(41, n, seed=2), rows(1, n, seed=1)[0]
    added = total + x
    got = elementwise.add_rms_norm(x, total, weight, 1e-6)
    assert torch.equal(total, added)
    assert torch.equal(got, elementwise.rms_norm(added, weight, 1e-6))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("n", [1, 8, 13, 1536])
def test_glu_equals_the_reference(library: ctypes.CDLL, activation: Activation, n: int) -> None:
    gate_up = rows(23, 2 * n, scale=4.0)
    expected = elementwise.reference_glu(gate_up.double(), activation)
    # gelu's tanh is 1 - 2 / (exp + 1) here: exact to a float32 unit of 1, which gates of up to 16 and ups multiply.
    torch.testing.assert_close(elementwise.glu(gate_up, activation).double(), expected, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_glu_of_extreme_gates_is_finite_and_of_nan_is_nan(library: ctypes.CDLL, activation: Activation) -> None:
    gates = torch.tensor([-1e30, -200.0, -88.0, 0.0, 88.0, 200.0, 1e30, math.nan])
    got = elementwise.glu(torch.cat([gates, torch.ones(8)]), activation)
    assert got[:3].abs().max() < 1e-8
    assert got[3:7].tolist() == [0.0, 88.0, 200.0, gates[6]]
    assert got[7].isnan()


@pytest.mark.parametrize(("heads", "dim", "turned"), [(1, 2, 2), (3, 6, 6), (3, 7, 4), (9, 64, 64), (9, 64, 32)])
def test_rope_equals_the_reference_on_strided_heads(library: ctypes.CDLL, heads: int, dim: int, turned: int) -> None:
    tokens = 37
    x = rows(heads, tokens * dim).view(heads, tokens, dim).transpose(0, 1)
    cos, sin = rows(tokens, turned, seed=3), rows(tokens, turned, seed=4)
    expected = elementwise.reference_rope(x.double(), cos[:, None].double(), sin[:, None].double())
    got = elementwise.rope(x, cos, sin)
    assert got.is_contiguous()
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=2e-6)
