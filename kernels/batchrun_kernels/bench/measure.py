"""Checks a prepared case, then times its ways by turns."""

import statistics
import time
from dataclasses import dataclass

from batchrun_kernels.bench.case import Prepared, Way

# The ways alternate this often: a machine that slows down meanwhile slows all of them.
_ROUNDS = 5


class CheckFailedError(Exception):
    """A way computes something else than its reference; it is not timed."""

    def __init__(self, way: str, error: float, tolerance: float) -> None:
        super().__init__(f"{way} differs from the reference by {error:.1e}, more than {tolerance:.1e}")


@dataclass(frozen=True, slots=True)
class Timing:
    way: str
    best_s: float
    median_s: float
    num_calls: int


def check(prepared: Prepared) -> float:
    """The largest error of all ways; raises CheckFailedError."""
    expected = prepared.reference().double()
    largest = 0.0
    for way in prepared.ways:
        found = way.read(way.call(0)).double()
        assert found.shape == expected.shape, f"{way.name}: {tuple(found.shape)} for {tuple(expected.shape)}"
        error = float((found - expected).abs().max())
        # Written so that NaN fails.
        if not error <= prepared.tolerance:
            raise CheckFailedError(way.name, error, prepared.tolerance)
        largest = max(largest, error)
    return largest


def time_ways(prepared: Prepared, seconds: float) -> list[Timing]:
    """About `seconds` for each way, and a call at least in every round."""
    turns = {way.name: 0 for way in prepared.ways}
    # Once to see how long it takes, and to wake threads.
    estimate_s = min(_call_s(prepared, way, turns) for way in prepared.ways)
    num_calls = min(prepared.num_copies, max(1, int(seconds / _ROUNDS / estimate_s)))
    found: dict[str, list[float]] = {way.name: [] for way in prepared.ways}
    for _ in range(_ROUNDS):
        for way in prepared.ways:
            found[way.name] += [_call_s(prepared, way, turns) for _ in range(num_calls)]
    return [Timing(name, min(times), statistics.median(times), len(times)) for name, times in found.items()]


def _call_s(prepared: Prepared, way: Way, turns: dict[str, int]) -> float:
    turns[way.name] = copy = (turns[way.name] + 1) % prepared.num_copies
    start = time.perf_counter()
    way.call(copy)
    prepared.wait()
    return time.perf_counter() - start
