"""The product of rounded weights and rounded rows is exact in its integers, whatever rows stand beside one."""

import ctypes
import math

import pytest
import torch
from torch import Tensor

from batchrun_kernels import native
from batchrun_kernels.packed_int8 import Int8Weight, round_rows
from tests.kernels.conftest import sets_of_instructions

# (num_outputs, k): below, at and off the panel's 16 outputs; k even and odd.
SHAPES = ((1, 1), (16, 3), (63, 111), (48, 576), (37, 1537))


def make(num_outputs: int, k: int, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """x [num_rows, k] with NaN before and behind it in memory, weight, bias."""
    random = torch.Generator().manual_seed(0)
    x = torch.full((num_rows + 2, k), math.nan)[1:-1]
    x.copy_(torch.randn(num_rows, k, generator=random))
    weight = torch.randn(num_outputs, k, generator=random) / math.sqrt(k)
    return x, weight, torch.randn(num_outputs, generator=random)


@pytest.mark.parametrize(("num_outputs", "k"), SHAPES)
@pytest.mark.parametrize("num_rows", [0, 1, 5, 6, 7, 8, 9, 13, 64, 250])
def test_equals_the_product_of_what_is_rounded(library: ctypes.CDLL, num_outputs: int, k: int, num_rows: int) -> None:
    """Integers are the same to the last; sums are of size one, in float32."""
    x, weight, bias = make(num_outputs, k, num_rows)
    packed = Int8Weight.pack(weight)
    expected = round_rows(x).double() @ packed.unpack().double().T
    torch.testing.assert_close(packed.linear(x, None).double(), expected, rtol=0, atol=2e-6)
    torch.testing.assert_close(packed.linear(x, bias), packed.linear(x, None) + bias, rtol=0, atol=0)


def test_rows_are_within_half_a_step_of_their_groups() -> None:
    x, _, _ = make(1, 100, 30)
    x[3, 32:64] = 0
    for got, group in zip(round_rows(x).split(32, dim=1), x.split(32, dim=1), strict=True):
        steps = group.abs().amax(dim=1, keepdim=True) / 127
        assert ((got - group).abs() <= steps * 0.5001).all()
        counts = got / steps.clamp_min(1e-30)
        assert ((counts - counts.round()).abs() < 1e-4).all()
    assert round_rows(torch.tensor([[2.5, 127.0, -3.5]])).tolist() == [[2.0, 127.0, -4.0]]
    assert round_rows(torch.full((1, 3), 1e-31)).tolist() == [[0.0, 0.0, 0.0]]


@pytest.mark.skipif(len(sets_of_instructions()) < 3, reason="needs a processor with AVX-512 and VNNI")
def test_both_sets_with_fused_multiply_adds_give_the_same_bits() -> None:
    library = native.needed()
    x, weight, bias = make(63, 111, 29)
    packed = Int8Weight.pack(weight)
    try:
        of_avx2, of_avx512 = [
            packed.linear(x, bias) for name in ("avx2", "avx512") if native.limit(library, name) == name
        ]
    finally:
        native.limit(library, native.INSTRUCTIONS[-1])
    assert torch.equal(of_avx2, of_avx512)


def test_a_weight_is_within_half_a_step_and_packs_to_itself() -> None:
    _, weight, _ = make(37, 211, 0)
    weight[5] = 0
    packed = Int8Weight.pack(weight)
    again = Int8Weight.pack(packed.unpack())
    steps = weight.abs().amax(dim=1, keepdim=True) / 127
    assert ((packed.unpack() - weight).abs() <= steps * 0.5001).all()
    assert torch.equal(again.panels, packed.panels)
    assert torch.equal(again.scales, packed.scales)
    ids = torch.tensor([[36, 0, 5], [3, 3, 9]])
    assert torch.equal(packed.rows(ids), packed.unpack()[ids])


@pytest.mark.parametrize("k", [1, 32, 33, 8000])
def test_the_largest_numbers_do_not_overflow(library: ctypes.CDLL, k: int) -> None:
    x, weight = torch.full((9, k), 3.0), torch.full((17, k), -2.0)
    weight[3] = 2.0
    got = Int8Weight.pack(weight).linear(x, None)
    expected = torch.full((9, 17), -6.0 * k)
    expected[:, 3] = 6.0 * k
    # The scale of -2 is rounded up to 16 bits.
    torch.testing.assert_close(got, expected, rtol=4e-5, atol=0)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_rows_bits_do_not_depend_on_the_batch(library: ctypes.CDLL, num_threads: int) -> None:
    x, weight, bias = make(91, 205, 61)
    packed = Int8Weight.pack(weight)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        alone = torch.cat([packed.linear(x[row : row + 1], bias) for row in range(len(x))])
        for num_rows in range(1, len(x) + 1):
            assert torch.equal(packed.linear(x[:num_rows], bias), alone[:num_rows]), num_rows
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("flaw", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 8, 34])
def test_a_row_that_is_not_finite_gives_nan_and_the_others_do_not(library: ctypes.CDLL, flaw: float, at: int) -> None:
    x, weight, _ = make(20, 35, 9)
    packed = Int8Weight.pack(weight)
    expected = packed.linear(x, None)
    x[4, at] = flaw
    got = packed.linear(x, None)
    assert got[4].isnan().all()
    assert torch.equal(got[:4], expected[:4])
    assert torch.equal(got[5:], expected[5:])


def test_a_row_of_zeros_gives_zeros(library: ctypes.CDLL) -> None:
    _, weight, _ = make(20, 35, 0)
    assert Int8Weight.pack(weight).linear(torch.zeros(3, 35), None).eq(0).all()


@pytest.mark.parametrize("num_outputs", [16, 21])
def test_writes_its_outputs_only(library: ctypes.CDLL, num_outputs: int) -> None:
    x, weight, _ = make(num_outputs, 34, 7)
    packed = Int8Weight.pack(weight)
    y, rounded = torch.full((9, num_outputs), 5.0), torch.full((library.batchrun_rounded_size(7, 34) + 1,), 5.0)
    weights = packed.panels.data_ptr(), packed.scales.data_ptr()
    to = y[1].data_ptr(), 7, num_outputs, 34, rounded.data_ptr()
    library.batchrun_gemm_int8(x.data_ptr(), *weights, None, *to)
    assert rounded[-1] == 5.0
    assert y[0].tolist() == y[-1].tolist() == [5.0] * num_outputs
    assert (y[1:-1] != 5.0).all()
