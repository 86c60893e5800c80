"""The C library in both of its forms."""

import ctypes
from collections.abc import Iterator

import pytest

from batchrun_kernels import native


@pytest.fixture(params=["best", "portable"])
def library(request: pytest.FixtureRequest) -> Iterator[ctypes.CDLL]:
    """Once with the instructions of this processor, once with everybody's."""
    library = native.find()
    if library is None:
        pytest.skip("needs the C kernels: a C compiler when the package was installed")
    library.batchrun_portable(request.param == "portable")
    yield library
    library.batchrun_portable(0)
