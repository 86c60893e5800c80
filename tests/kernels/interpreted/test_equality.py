"""Odd heads, groups and blocks, quantised pools under every dtype of queries, and random trees, splits and windows."""

import pytest
import torch

from tests.kernels.equality import ATOL, CASES, DTYPES
from tests.kernels.interpreted.equality import measure, random_error

SHAPED = [name for name, case in CASES.items() if case.shape != CASES["plain"].shape or case.stored is not None]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SHAPED)
def test_shapes_and_quantised_pools_equal_the_reference(device: torch.device, name: str, dtype: torch.dtype) -> None:
    assert measure(CASES[name], dtype, device) < ATOL[dtype]


@pytest.mark.parametrize("seed", range(16))
def test_random_steps_equal_the_reference(device: torch.device, seed: int) -> None:
    assert random_error(seed, device) < ATOL[torch.float32]
