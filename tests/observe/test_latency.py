"""Histograms of durations: right to within their stated error, small, and sums of their parts."""

import json
import random
import re
from math import ceil

import pytest

from batchrun.cli_text import latency_lines
from batchrun.latency import ERROR, Histogram, Latencies


def histogram(durations: list[float]) -> Histogram:
    found = Histogram()
    for seconds in durations:
        found.add(seconds)
    return found


def durations(seed: int, count: int) -> list[float]:
    """From microseconds to days."""
    rng = random.Random(seed)
    return [10 ** rng.uniform(-5.9, 6) for _ in range(count)]


@pytest.mark.parametrize("count", [1, 2, 63, 1111])
@pytest.mark.parametrize("percent", [1, 50, 90, 99, 100])
def test_a_percentile_is_that_of_the_sorted_durations_to_within_the_error(count: int, percent: float) -> None:
    measured = durations(count, count)
    exact = sorted(measured)[ceil(count * percent / 100) - 1]
    assert histogram(measured).percentile(percent) == pytest.approx(exact, rel=ERROR * 1.000001)


def test_without_durations_there_is_no_percentile() -> None:
    assert Histogram().percentile(50) is None
    assert Histogram().summary() == {"count": 0}


def test_no_duration_is_too_short_or_too_long() -> None:
    found = histogram([0.0, -1.0, 1e-9, 1e12])
    assert found.count == 4
    assert found.percentile(50) == pytest.approx(1e-6, rel=2 * ERROR)
    assert found.percentile(100) == pytest.approx(1e7, rel=2 * ERROR)


def test_memory_is_bounded() -> None:
    found = histogram(durations(seed=5, count=20_000))
    assert found.count == 20_000
    assert len(found.counts) <= 750


def test_parts_add_up_to_the_whole_and_survive_json() -> None:
    first, second = durations(1, 63), durations(2, 111)
    told = json.loads(json.dumps(histogram(first).to_dict()))
    assert Histogram.from_dict(told) + histogram(second) == histogram(first + second)
    latencies = Latencies(histogram(first), histogram(second), Histogram())
    assert Latencies.from_dict(json.loads(json.dumps(latencies.to_dict()))) == latencies
    assert Latencies.from_dict({}) == Latencies()


def test_lines_show_what_was_measured() -> None:
    latencies = Latencies(first_token=histogram([1.23] * 63 + [300.0] * 3), per_token=histogram([0.0456]))
    shown = dict(latency_lines(latencies.summary()))
    assert list(shown) == ["first token", "per token"]
    assert re.fullmatch(r"p50 1\.2\ds · p90 1\.2\ds · p99 [45]m\d\ds", shown["first token"])
    assert re.fullmatch(r"p50 4[456](\.\d)?ms · p90 4[456](\.\d)?ms · p99 4[456](\.\d)?ms", shown["per token"])
