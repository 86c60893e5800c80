"""What a job did over time: samples of its runs, in a file that every process of the job continues.

A sample says what happened since the one before it, so that two neighbours can be made one without loss. The standard
library only: `status` reads this too.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, astuple, dataclass, field, fields
from functools import reduce
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from batchrun.engine.statistics import Counters
from batchrun.latency import NUM_SLOWEST, Histogram, Latencies, RowTime


@dataclass(frozen=True, slots=True)
class Sample:
    """What happened in `seconds` that ended at `at` (seconds since the epoch).

    `counters` and `latencies` count what was added, `busy_s` is processor time of all threads. `num_running`,
    `num_waiting` and `kv_usage` (a share of 1) are means over the time, `kv_peak` is the most that it
    was, as far as it was seen; the most of a whole run always is. `rows_done` and `rows_failed` are those of the whole
    job at the end, `num_nodes` is the prefix tree's size then. `slowest` are rows that ended in the time and were among
    the slowest of their process, the slowest first.
    """

    at: float
    seconds: float
    rows_done: int
    rows_failed: int
    num_running: float
    num_waiting: float
    kv_usage: float
    kv_peak: float
    num_nodes: int
    busy_s: float
    counters: Counters = field(default_factory=Counters)
    latencies: Latencies = field(default_factory=Latencies)
    slowest: tuple[RowTime, ...] = ()

    def __add__(self, later: "Sample") -> "Sample":
        """The two as one."""
        seconds = self.seconds + later.seconds

        def mean(one: float, other: float) -> float:
            return (one * self.seconds + other * later.seconds) / seconds if seconds else other

        return Sample(
            at=later.at,
            seconds=seconds,
            rows_done=later.rows_done,
            rows_failed=later.rows_failed,
            num_running=mean(self.num_running, later.num_running),
            num_waiting=mean(self.num_waiting, later.num_waiting),
            kv_usage=mean(self.kv_usage, later.kv_usage),
            kv_peak=max(self.kv_peak, later.kv_peak),
            num_nodes=later.num_nodes,
            busy_s=self.busy_s + later.busy_s,
            counters=self.counters + later.counters,
            latencies=self.latencies + later.latencies,
            slowest=tuple(sorted({*self.slowest, *later.slowest}, reverse=True)[:NUM_SLOWEST]),
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON; counts of 0 are left out."""
        plain = {name: _rounded(getattr(self, name)) for name in _PLAIN}
        return plain | {
            "counters": {name: count for name, count in asdict(self.counters).items() if count},
            "latencies": {each.name: _buckets(getattr(self.latencies, each.name)) for each in fields(Latencies)},
            "slowest": [[_rounded(value) for value in astuple(row)] for row in self.slowest],
        }

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Self:
        """What `to_dict` made. Raises KeyError, TypeError or ValueError for anything else."""
        latencies = content["latencies"]
        return cls(
            **{name: content[name] for name in _PLAIN},
            counters=Counters(**content["counters"]),
            latencies=Latencies(**{each.name: _histogram(latencies[each.name]) for each in fields(Latencies)}),
            slowest=tuple(RowTime(*row) for row in content["slowest"]),
        )


_PLAIN = [each.name for each in fields(Sample) if each.name not in ("counters", "latencies", "slowest")]


@dataclass(frozen=True, slots=True)
class Run:
    """One process's work on the job. It began at `at`, ready to run after `load_s`; `facts` are those of `RunBegan`.

    `ended` is how it ended, None where it said no word.
    """

    at: float
    load_s: float
    facts: dict[str, Any]
    samples: tuple[Sample, ...] = ()
    ended: str | None = None

    @property
    def seconds(self) -> float:
        """The time that the engine ran, as far as it is recorded."""
        return sum(sample.seconds for sample in self.samples)

    @property
    def ended_at(self) -> float:
        """When it was last heard of; seconds since the epoch."""
        return self.samples[-1].at if self.samples else self.at + self.load_s

    @property
    def total(self) -> Sample | None:
        """All samples as one; None without any."""
        return reduce(Sample.__add__, self.samples) if self.samples else None


@dataclass(frozen=True, slots=True)
class Series:
    """The runs of a job, the first one first."""

    runs: tuple[Run, ...] = ()

    @property
    def samples(self) -> tuple[Sample, ...]:
        return tuple(sample for run in self.runs for sample in run.samples)

    @property
    def total(self) -> Sample | None:
        """All samples of all runs as one; None without any."""
        totals = [run.total for run in self.runs]
        return reduce(Sample.__add__, filter(None, totals)) if any(totals) else None

    @property
    def seconds(self) -> float:
        """The time that the engine ran, over all runs."""
        return sum(run.seconds for run in self.runs)

    @property
    def peak_kv_bytes(self) -> int:
        """The most of the pools that was seen in use."""
        peaks = ((run.total, run.facts.get("pool_bytes", 0)) for run in self.runs)
        return max((round(total.kv_peak * pool) for total, pool in peaks if total), default=0)

    def thinned(self) -> "Series":
        """Half the samples: every two neighbours of a run made one."""
        return Series(
            tuple(
                Run(run.at, run.load_s, run.facts, tuple(_paired(run.samples)), run.ended) if run.samples else run
                for run in self.runs
            )
        )

    def to_lines(self) -> str:
        """The content of its file."""
        return "".join(line for run in self.runs for line in _lines(run))


def read(path: Path) -> Series:
    """The series in a file; what was torn by a power cut or is of another version is passed over."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return Series()
    runs: list[Run] = []
    samples: list[Sample] = []
    for line in lines:
        try:
            ((kind, content),) = json.loads(line).items()
            if kind == "began":
                runs = _with(runs, samples)
                samples = []
                runs.append(Run(content["at"], content["load_s"], content["facts"]))
            elif kind == "sample" and runs:
                samples.append(Sample.from_dict(content))
            elif kind == "ended" and runs:
                runs = _with(runs, samples, content["how"])
                samples = []
        except (KeyError, TypeError, ValueError, AttributeError):
            continue
    return Series(tuple(_with(runs, samples)))


def began_line(at: float, load_s: float, facts: dict[str, Any]) -> str:
    return _line("began", {"at": round(at, 3), "load_s": round(load_s, 3), "facts": facts})


def sample_line(sample: Sample) -> str:
    return _line("sample", sample.to_dict())


def ended_line(how: str) -> str:
    return _line("ended", {"how": how})


def _with(runs: list[Run], samples: list[Sample], ended: str | None = None) -> list[Run]:
    """`runs`, the last of which gets `samples` and its end."""
    if not runs or not (samples or ended):
        return runs
    *before, last = runs
    return [*before, Run(last.at, last.load_s, last.facts, (*last.samples, *samples), ended or last.ended)]


def _paired(samples: tuple[Sample, ...]) -> Iterable[Sample]:
    pairs = [one + other for one, other in list(pairwise(samples))[::2]]
    return pairs if len(samples) % 2 == 0 else [*pairs, samples[-1]]


def _lines(run: Run) -> Iterable[str]:
    yield began_line(run.at, run.load_s, run.facts)
    yield from map(sample_line, run.samples)
    if run.ended is not None:
        yield ended_line(run.ended)


def _line(kind: str, content: dict[str, Any]) -> str:
    return json.dumps({kind: content}, separators=(",", ":")) + "\n"


def _buckets(histogram: Histogram) -> dict[str, int]:
    return {str(bucket): count for bucket, count in sorted(histogram.counts.items())}


def _histogram(buckets: dict[str, int]) -> Histogram:
    return Histogram({int(bucket): int(count) for bucket, count in buckets.items()})


def _rounded(value: float) -> float:
    return round(value, 4) if isinstance(value, float) else value
