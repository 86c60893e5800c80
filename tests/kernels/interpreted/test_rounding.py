"""The arithmetic that the other tests here rest on is a GPU's: products of bfloat16, rounding to nearest even."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.kernels.interpreted.steps import skip_without


@triton.jit
def dot_kernel(a_ptr, b_ptr, out_ptr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    a = tl.load(a_ptr + row * SIZE + column)
    b = tl.load(b_ptr + row * SIZE + column)
    tl.store(out_ptr + row * SIZE + column, tl.dot(a, b))


@triton.jit
def cast_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, SIZE)
    tl.store(out_ptr + at, tl.load(x_ptr + at).to(out_ptr.dtype.element_ty))


def test_a_product_of_bfloat16_is_right(device: torch.device) -> None:
    a, b = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(0)).bfloat16().to(device)
    out = torch.empty(16, 16, device=device)
    dot_kernel[(1,)](a, b, out, SIZE=16)
    # float32 sums of 16 exact products.
    torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_rounding_is_to_nearest_even(device: torch.device, dtype: torch.dtype) -> None:
    skip_without(dtype, device)
    x = torch.randn(1024, generator=torch.Generator().manual_seed(0)).to(device) * 3
    # Ties, numbers that round up into the next exponent, and zero.
    x[:5] = torch.tensor([1 + 2**-9, 1 + 3 * 2**-9, 1.99999, -3.99999, 0.0])
    out = torch.empty(1024, dtype=dtype, device=device)
    cast_kernel[(1,)](x, out, SIZE=1024)
    expected: Tensor = x.to(dtype)
    assert torch.equal(out.float(), expected.float())


def test_an_integer_becomes_the_bfloat16_of_its_value(device: torch.device) -> None:
    """As int8 keys do before their product with bfloat16 queries."""
    x = torch.arange(-128, 128, dtype=torch.int8, device=device)
    out = torch.empty(256, dtype=torch.bfloat16, device=device)
    cast_kernel[(1,)](x, out, SIZE=256)
    assert torch.equal(out, x.bfloat16())
