"""Tests of the Triton kernels: run by Triton's interpreter in a process of their own, or on a GPU as they are.

`TRITON_INTERPRET=1 pytest tests/kernels/interpreted`, which is what `tests/kernels/test_interpreted.py` does: Triton
reads the variable when it is first imported, so it must be set before anything imports Triton.
"""

import os

import pytest
import torch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if IS_INTERPRETED:
    from tests.kernels.interpreted.rounding import repair

    repair()
elif not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu" if IS_INTERPRETED else "cuda")
