"""Odd heads, groups and blocks, quantised pools under every dtype of queries, and random trees, splits and windows."""

import pytest
import torch

from tests.kernels.equality import ATOL, CASES, DTYPES
from tests.kernels.interpreted.equality import measure, random_error
from tests.kernels.interpreted.steps import skip_without

QUANTISED = [name for name, case in CASES.items() if case.stored is not None and case.stored.itemsize == 1]
SHAPED = [name for name, case in CASES.items() if case.shape != CASES["plain"].shape]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SHAPED + QUANTISED)
def test_shapes_and_quantised_pools_equal_the_reference(device: torch.device, name: str, dtype: torch.dtype) -> None:
    skip_without(CASES[name].stored or dtype, device)
    found = measure(CASES[name], dtype, device)
    assert isinstance(found, float)
    assert found < ATOL[dtype]


@pytest.mark.parametrize("seed", range(16))
def test_random_steps_equal_the_reference(device: torch.device, seed: int) -> None:
    assert random_error(seed, device) < ATOL[torch.float32]
