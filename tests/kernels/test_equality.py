"""The table of `tests.kernels.equality`: what each attention on the CPU does of it, and what it refuses."""

import pytest
import torch

from batchrun_kernels import native
from batchrun_kernels.worklist import RUNS_HI, Planner
from tests.kernels.equality import ATOL, CASES, DTYPES, Case, measure

pytestmark = pytest.mark.usefixtures("two_threads")


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference_or_is_refused(name: str) -> None:
    case, row = CASES[name], measure(CASES[name])
    if case.stored is None:
        assert float(row.pop("list")[str(torch.float32)]) < 1e-12
    for implementation, by_dtype in row.items():
        for dtype in DTYPES:
            found = by_dtype[str(dtype)]
            if isinstance(found, float):
                assert found < ATOL[dtype], (implementation, dtype)
            else:
                assert is_refused(case, implementation, dtype), (implementation, dtype, found)


def is_refused(case: Case, implementation: str, dtype: torch.dtype) -> bool:
    """In torch, a pool of another dtype than the queries; in C all but float32, a pool in halves, whole vectors."""
    if implementation == "torch":
        return case.stored not in (None, dtype)
    has_pool = case.stored in (None, torch.float16)
    return native.find() is None or dtype != torch.float32 or not has_pool or case.shape.value_dim % 8 != 0


def test_the_cases_do_what_they_are_called() -> None:
    """A tree without a shared item, pieces that are never cut, or runs that nobody finds, would prove nothing."""
    lists = {name: Planner(case.own_rules).plan(case.step.work) for name, case in CASES.items()}
    assert lists["plain"].num_slots == 0
    assert lists["split pieces"].num_slots > 0
    assert lists["shared prefixes"].num_slots > 0
    assert len(lists["all of these"].merges.tokens) > 0
    assert all((one[:, RUNS_HI] > 0).any() for one in (lists["blocks in runs"].wide, lists["blocks in runs"].narrow))
