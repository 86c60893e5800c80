"""The C library with every set of instructions that this processor has."""

import ctypes
from collections.abc import Iterator

import pytest

from batchrun_kernels import native


def sets_of_instructions() -> list[str]:
    """Those in use when no better one is allowed."""
    library = native.find()
    if library is None:
        return ["portable"]
    found = [native.limit(library, name) for name in native.INSTRUCTIONS]
    return list(dict.fromkeys(found))


@pytest.fixture(params=sets_of_instructions())
def library(request: pytest.FixtureRequest) -> Iterator[ctypes.CDLL]:
    library = native.find()
    if library is None:
        pytest.skip("needs the C kernels: a C compiler when the package was installed")
    assert native.limit(library, request.param) == request.param
    yield library
    native.limit(library, native.INSTRUCTIONS[-1])
