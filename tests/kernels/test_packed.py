"""The packed matrix product equals float64's, and a row's bits are the same whatever is computed beside it."""

import ctypes
import math

import pytest
import torch
from torch import Tensor

from batchrun_kernels import native
from batchrun_kernels.packed import PackedWeight, reference_linear
from tests.kernels.conftest import sets_of_instructions

# (num_outputs, k): below, at and off the panel's 16 outputs; k below, off and beyond one piece of 1536.
SHAPES = ((1, 1), (16, 3), (63, 111), (48, 576), (37, 1537), (16, 3080))


def make(num_outputs: int, k: int, num_rows: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """x [num_rows, k] with NaN before and behind it in memory, weight, bias."""
    random = torch.Generator().manual_seed(seed)
    x = torch.full((num_rows + 2, k), math.nan)[1:-1]
    x.copy_(torch.randn(num_rows, k, generator=random))
    weight = torch.randn(num_outputs, k, generator=random) / math.sqrt(k)
    return x, weight, torch.randn(num_outputs, generator=random)


@pytest.mark.parametrize(("num_outputs", "k"), SHAPES)
@pytest.mark.parametrize("num_rows", [0, 1, 5, 6, 7, 8, 13, 64, 111, 250])
def test_equals_the_reference(library: ctypes.CDLL, num_outputs: int, k: int, num_rows: int) -> None:
    x, weight, bias = make(num_outputs, k, num_rows)
    packed = PackedWeight.pack(weight)
    # One chain of k float32 additions whose sum is of size one; 3.2e-6 is the worst that was measured.
    torch.testing.assert_close(packed.linear(x, None).double(), reference_linear(x, weight, None), rtol=0, atol=1e-5)
    torch.testing.assert_close(packed.linear(x, bias).double(), reference_linear(x, weight, bias), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("num_outputs", "k"), [*SHAPES, (2000, 64)])
@pytest.mark.parametrize("num_rows", [0, 1, 7, 13, 64, 250])
@pytest.mark.parametrize("shift", [-9.0, 0.0])
def test_the_largest_are_those_of_all_outputs(
    library: ctypes.CDLL, num_outputs: int, k: int, num_rows: int, shift: float
) -> None:
    """Also where all are negative, and below the zeros that fill the last panel."""
    x, weight, _ = make(num_outputs, k, num_rows)
    x[:, 0] = 1
    weight[:, 0] += shift
    packed = PackedWeight.pack(weight)
    expected = packed.linear(x, None).max(dim=-1)
    assert all(map(torch.equal, packed.largest(x), expected))


def test_of_several_largest_the_first_is_told_and_nan_is_larger_than_any(library: ctypes.CDLL) -> None:
    weight = torch.zeros(300, 3)
    weight[[17, 40, 41, 299], 0] = 2.0
    weight[[5, 250], 1] = math.inf
    weight[77, 2] = math.nan
    values, places = PackedWeight.pack(weight).largest(torch.eye(3).mul(1.0))
    assert values[0].isnan()  # zero times infinity
    weight[weight.isinf()] = 1e30
    weight[77, 2] = 1.0
    x = torch.tensor([[1.0, 0, 0], [-1.0, 0, 0], [0, 1e30, 0], [0, -1e30, 0], [0, 0, math.nan]])
    values, places = PackedWeight.pack(weight).largest(x)
    assert values[:4].tolist() == [2.0, 0.0, math.inf, 0.0]
    assert places[:4].tolist() == [17, 0, 5, 0]
    assert values[4].isnan()


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_rows_bits_do_not_depend_on_the_batch(library: ctypes.CDLL, num_threads: int) -> None:
    x, weight, bias = make(91, 2050, 61)
    packed = PackedWeight.pack(weight)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        alone = torch.cat([packed.linear(x[row : row + 1], bias) for row in range(len(x))])
        for num_rows in range(1, len(x) + 1):
            assert torch.equal(packed.linear(x[:num_rows], bias), alone[:num_rows]), num_rows
    finally:
        torch.set_num_threads(before)
    assert torch.equal(packed.linear(x, bias), alone)


@pytest.mark.skipif(len(sets_of_instructions()) < 3, reason="needs a processor with AVX-512 and VNNI")
def test_both_sets_with_fused_multiply_adds_give_the_same_bits() -> None:
    """So an answer does not depend on the machine through its matrix products."""
    library = native.needed()
    x, weight, bias = make(91, 2050, 29)
    packed = PackedWeight.pack(weight)
    try:
        of_avx2, of_avx512 = [
            packed.linear(x, bias) for name in ("avx2", "avx512") if native.limit(library, name) == name
        ]
    finally:
        native.limit(library, native.INSTRUCTIONS[-1])
    assert torch.equal(of_avx2, of_avx512)


@pytest.mark.parametrize("num_outputs", [16, 21])
def test_writes_its_outputs_only_and_reads_no_more_than_it_may(library: ctypes.CDLL, num_outputs: int) -> None:
    x, weight, _ = make(num_outputs, 35, 7)
    packed = PackedWeight.pack(weight)
    panels = torch.full((len(packed.panels) + 1, 35, 16), math.nan)
    panels[:-1] = packed.panels
    y = torch.full((9, num_outputs), 5.0)
    library.batchrun_gemm(x.data_ptr(), panels.data_ptr(), None, y[1].data_ptr(), 7, num_outputs, 35)
    assert torch.equal(y[1:-1], packed.linear(x, None))
    assert y[0].tolist() == y[-1].tolist() == [5.0] * num_outputs


def test_batches_of_any_shape_and_strides_are_rows(library: ctypes.CDLL) -> None:
    x, weight, bias = make(20, 6, 30)
    packed = PackedWeight.pack(weight)
    shaped = x.view(5, 6, 6).transpose(0, 1)
    assert torch.equal(packed.linear(shaped, bias), packed.linear(x, bias).view(5, 6, 20).transpose(0, 1))


@pytest.mark.parametrize("num_outputs", [16, 33])
def test_unpacks_to_the_same_bits_and_looks_rows_up(num_outputs: int) -> None:
    _, weight, _ = make(num_outputs, 7, 0)
    packed = PackedWeight.pack(weight)
    assert torch.equal(packed.unpack(), weight)
    ids = torch.tensor([[num_outputs - 1, 0, 5], [3, 3, 9]])
    assert torch.equal(packed.rows(ids), weight[ids])


@pytest.mark.parametrize("sizes", [(32, 16, 16), (48, 21), (21, 16), (7, 9, 5)])
def test_weights_packed_together_are_the_one_that_they_make(sizes: tuple[int, ...]) -> None:
    """Also where a panel has outputs of two of them, and where one is a transposed view."""
    weights = [make(size, 35, 0, seed)[1] for seed, size in enumerate(sizes)]
    weights[0] = weights[0].T.contiguous().T
    together, one = PackedWeight.pack(*weights), PackedWeight.pack(torch.cat(weights))
    assert together.num_outputs == one.num_outputs
    assert torch.equal(together.panels, one.panels)
