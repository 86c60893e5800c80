"""Over a thousand random trees, splits and windows: every attention on the CPU, and the planner, against float64."""

import pytest
import torch

from batchrun_kernels.cpu import GatherAttention
from batchrun_kernels.native_attention import NativeAttention
from batchrun_kernels.reference import ReferenceAttention
from batchrun_kernels.worklist import Planner
from tests.kernels.equality import ATOL, largest_error, native_forms
from tests.kernels.executor import execute
from tests.kernels.random_steps import random_step
from tests.kernels.steps import attend, cast
from tests.kernels.worklists import check

pytestmark = pytest.mark.usefixtures("two_threads")


@pytest.mark.parametrize("hundred", range(10))
def test_random_steps_equal_the_reference(hundred: int) -> None:
    num_native = 0
    for seed in range(100 * hundred, 100 * hundred + 100):
        case = random_step(seed)
        step, exact = case.step, cast(case.step, torch.float64)
        expected = attend(ReferenceAttention(), exact, case.mask)
        assert not expected.isnan().any()
        listed = Planner(case.rules).plan(step.work)
        check(listed, step.work, case.rules)
        # float64 on both sides.
        assert largest_error(execute(listed, step.q, step.keys, step.values, case.mask), expected) < 1e-12, seed
        assert largest_error(attend(GatherAttention(), step, case.mask), expected) < ATOL[torch.float32], seed
        for _ in native_forms(step):
            num_native += 1
            assert largest_error(attend(NativeAttention(), step, case.mask), expected) < ATOL[torch.float32], seed
