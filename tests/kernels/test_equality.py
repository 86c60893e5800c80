"""The table of `tests.kernels.equality`: what each attention on the CPU does of it, and what it refuses."""

import pytest
import torch

from batchrun_kernels import native
from batchrun_kernels.worklist import Planner
from tests.kernels.equality import ATOL, CASES, DTYPES, measure


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference_or_is_refused(name: str) -> None:
    case = CASES[name]
    for implementation, row in measure(case).items():
        for dtype in DTYPES:
            found = row.get(str(dtype))
            if isinstance(found, float):
                assert found < (1e-12 if implementation == "list" else ATOL[dtype]), (implementation, dtype)
            elif case.stored is not None:
                assert found == "a pool of the engine has no scales"
            elif implementation == "list":
                assert dtype != torch.float32
            else:
                # Torch takes everything else; the attention in C float32 and whole vectors of values.
                assert implementation.startswith("C "), implementation
                assert native.find() is None or dtype != torch.float32 or case.shape.value_dim % 8


def test_the_cases_do_what_they_are_called() -> None:
    """A tree without a shared item, or pieces that are never cut, would prove nothing."""
    lists = {name: Planner(case.own_rules).plan(case.step.work) for name, case in CASES.items()}
    assert lists["plain"].num_slots == 0
    assert lists["split pieces"].num_slots > 0
    assert lists["shared prefixes"].num_slots > 0
    assert len(lists["all of these"].merges.tokens) > 0
