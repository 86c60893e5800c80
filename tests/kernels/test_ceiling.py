"""Rates are what was done over the time that it took."""

import pytest

from batchrun_kernels.bench import ceiling as subject
from batchrun_kernels.bench.ceiling import Ceiling, measure_torch


def test_without_the_library_rates_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a sum over floats and of a product of two matrices, 2 seconds each."""
    monkeypatch.setattr(subject, "_READ_FLOATS", 63)

    def two_seconds(call: object) -> float:
        assert callable(call)
        call()
        return 2.0

    monkeypatch.setattr(subject, "_best_s", two_seconds)
    assert measure_torch(size=7) == Ceiling(bytes_per_s=63 * 4 / 2, flops_per_s=2 * 7**3 / 2)
