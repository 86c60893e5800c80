"""How long rows wait for their tokens: durations counted in buckets, so that memory is bounded and runs add up.

A bucket's upper border is a constant factor above its lower one, so a percentile is off by a constant share of itself
at most (DDSketch: Masson, Rim and Lee, VLDB 2019, section 2).
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, log
from typing import Any, Self

ERROR = 0.02  # of a percentile, relative, at most
_GROWTH = (1 + ERROR) / (1 - ERROR)
_SHORTEST_S, _LONGEST_S = 1e-6, 1e7  # what is outside counts as these: at most 749 buckets
_PERCENTILES = (50, 90, 99)
NUM_SLOWEST = 10  # rows that are named


@dataclass(frozen=True, slots=True)
class Histogram:
    """Durations in seconds: how many are in each bucket, whose upper border is its number's power of the growth."""

    counts: dict[int, int] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Durations that were added."""
        return sum(self.counts.values())

    def add(self, seconds: float, times: int = 1) -> None:
        bucket = ceil(log(min(max(seconds, _SHORTEST_S), _LONGEST_S), _GROWTH))
        self.counts[bucket] = self.counts.get(bucket, 0) + times

    def percentile(self, percent: float) -> float | None:
        """The shortest duration that so many percent of all do not exceed, to within `ERROR`; None without any."""
        rank, seen = ceil(self.count * percent / 100), 0
        for bucket, count in sorted(self.counts.items()):
            seen += count
            if seen >= rank:
                return _middle(bucket)
        return None

    def count_up_to(self, seconds: float) -> int:
        """Durations that are not longer, to within `ERROR`."""
        return sum(count for bucket, count in self.counts.items() if _middle(bucket) <= seconds)

    @property
    def total(self) -> float:
        """The sum of all durations, in seconds, to within `ERROR`."""
        return sum(_middle(bucket) * count for bucket, count in self.counts.items())

    def __add__(self, other: "Histogram") -> "Histogram":
        return Histogram(dict(Counter(self.counts) + Counter(other.counts)))

    def __sub__(self, earlier: "Histogram") -> "Histogram":
        """What was added since `earlier`, a copy of this one."""
        return Histogram(dict(Counter(self.counts) - Counter(earlier.counts)))

    def summary(self) -> dict[str, float]:
        """`count`, and when that is not 0 the percentiles `p50`, `p90` and `p99`; seconds."""
        found = {f"p{percent}": self.percentile(percent) for percent in _PERCENTILES}
        return {"count": self.count, **{name: round(value, 6) for name, value in found.items() if value is not None}}

    def to_dict(self) -> dict[str, Any]:
        """`summary` and the buckets, for JSON."""
        return {**self.summary(), "buckets": {str(bucket): count for bucket, count in sorted(self.counts.items())}}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """What `to_dict` made."""
        return cls({int(bucket): int(count) for bucket, count in content.get("buckets", {}).items()})


@dataclass(frozen=True, slots=True, order=True)
class RowTime:
    """How long one row took; a slower one is greater.

    `run_s` is from the first step that computes anything of it to its end, `queue_s` what it waited before. What the
    row had before a resume is in neither.
    """

    run_s: float
    queue_s: float
    row_idx: int
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Latencies:
    """What the rows of a run waited for. A row arrives when the engine is given it, which keeps a few hundred waiting.

    `queue` is from arrival until the first step that computes anything of the row, `first_token` from arrival until its
    first token, `per_token` from one token of a row to its next one, whatever lies between. `queue` is of the same rows
    as `first_token`: those that got their first token, which a resumed row may have had before. Where rows are only
    read there is none, and `queue` is of those that are done.
    """

    queue: Histogram = field(default_factory=Histogram)
    first_token: Histogram = field(default_factory=Histogram)
    per_token: Histogram = field(default_factory=Histogram)

    def __add__(self, other: "Latencies") -> "Latencies":
        return Latencies(
            self.queue + other.queue, self.first_token + other.first_token, self.per_token + other.per_token
        )

    def __sub__(self, earlier: "Latencies") -> "Latencies":
        """What was measured since `earlier`, a copy of this one."""
        return Latencies(
            self.queue - earlier.queue, self.first_token - earlier.first_token, self.per_token - earlier.per_token
        )

    def summary(self) -> dict[str, dict[str, float]]:
        """Counts and percentiles, under vLLM's names for them; seconds."""
        return {name: histogram.summary() for name, histogram in self._named().items()}

    def to_dict(self) -> dict[str, Any]:
        """`summary` with the buckets, for JSON."""
        return {name: histogram.to_dict() for name, histogram in self._named().items()}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """What `to_dict` made; nothing from nothing."""
        return cls(*(Histogram.from_dict(content.get(name, {})) for name in cls()._named()))

    def _named(self) -> dict[str, Histogram]:
        return {
            "queue_time_s": self.queue,
            "time_to_first_token_s": self.first_token,
            "time_per_output_token_s": self.per_token,
        }


def _middle(bucket: int) -> float:
    """The duration that is off by the same share from both borders of the bucket."""
    return float(2 * _GROWTH**bucket / (_GROWTH + 1))
