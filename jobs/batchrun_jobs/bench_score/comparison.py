"""The runs of all ways, by turns, how far apart their log-likelihoods are, and a table of it."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from batchrun_jobs.bench import floor
from batchrun_jobs.bench.floor import Floor, Rates
from batchrun_jobs.bench.process import ChildFailedError, Ended, Processes
from batchrun_jobs.bench.way import Way
from batchrun_jobs.bench_score.workload import ScoreWorkload

_HEADER = (
    "way", "run s", "min-max", "choices/s", "tok/s", "computed", "peak MiB", "ready s", "ratio", "x floor", "apart",
    "others",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Run:
    """One run: seconds until the first row was handed over, and from then on until the last one was back; bytes."""

    ready_s: float
    run_s: float
    logprobs: tuple[tuple[float, ...], ...]
    computed_tokens: int | None
    peak_rss: int | None
    others: float | None

    @classmethod
    def of(cls, ended: Ended) -> "Run":
        found: dict[str, Any] = ended.returned
        return cls(
            found["began"] - ended.started,
            found["ended"] - found["began"],
            tuple(map(tuple, found["logprobs"])),
            found["computed_tokens"],
            found["peak_rss"],
            ended.others,
        )


@dataclass(frozen=True, slots=True)
class Compared:
    """`apart`: the largest difference to the first way in a log-likelihood, for each token of the choice."""

    runs: Mapping[str, Sequence[Run]]
    apart: Mapping[str, float]
    floor: Floor | None
    failed: tuple[str, ...]


def compare(
    ways: Sequence[Way], work: ScoreWorkload, processes: Processes, *, repeat: int, say: Callable[[str], None]
) -> Compared:
    """Runs each way `repeat` times, by turns, and measures the machine between. Raises ChildFailedError."""
    decoder = None if processes.model is None else floor.read_decoder(processes.model)
    rates: list[Rates] = []
    runs: defaultdict[str, list[Run]] = defaultdict(list)
    failed: dict[str, str] = {}
    for turn in range(repeat + 1):
        if decoder is not None:
            rates.append(floor.measure_rates(processes))
        for way in ways if turn < repeat else ():
            if way.label in failed:
                continue
            try:
                run = Run.of(processes.run(way.script, way.python, work, dict(way.options)))
            except ChildFailedError as error:
                failed[way.label] = f"{way.label} failed: {error}"
                continue
            runs[way.label].append(run)
            say(f"{way.label}: {run.run_s:.2f} s, ready after {run.ready_s:.1f} s")
    good = {label: measured for label, measured in runs.items() if label not in failed}
    first = next(iter(good.values()))[0] if good else None
    apart = {
        label: max(_apart(first, run, work) for run in measured)
        for label, measured in good.items()
        if first is not None
    }
    if decoder is None:
        return Compared(good, apart, None, tuple(failed.values()))
    least = floor.least_for_reading(work.texts, work.num_read, decoder)
    return Compared(good, apart, Floor(least, tuple(rates)), tuple(failed.values()))


def table(found: Compared, work: ScoreWorkload) -> str:
    """Aligned columns, a line a way; medians over the runs."""
    base = median(run.run_s for run in next(iter(found.runs.values())))
    lines = [_HEADER, *(_cells(label, runs, found, work, base) for label, runs in found.runs.items())]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([cells[0].ljust(widths[0]), *(map(str.rjust, cells[1:], widths[1:]))]).rstrip() for cells in lines
    )


def _cells(label: str, runs: Sequence[Run], found: Compared, work: ScoreWorkload, base: float) -> tuple[str, ...]:
    times = [run.run_s for run in runs]
    run_s = median(times)
    computed, peak, others = runs[-1].computed_tokens, runs[-1].peak_rss, [run.others for run in runs]
    return (
        label,
        f"{run_s:.2f}",
        f"{min(times):.2f}-{max(times):.2f}",
        f"{work.num_choices / run_s:.2f}",
        f"{work.num_tokens / run_s:.0f}",
        "-" if computed is None else f"{computed / work.num_tokens:.1%}",
        "-" if peak is None else f"{peak / (1 << 20):.0f}",
        f"{median(run.ready_s for run in runs):.1f}",
        f"{run_s / base:.2f}",
        "-" if found.floor is None else f"{run_s / found.floor.seconds:.2f}",
        f"{found.apart[label]:.0e}",
        "-" if None in others else f"{max(other for other in others if other is not None):.0%}",
    )


def _apart(one: Run, other: Run, work: ScoreWorkload) -> float:
    rows = zip(one.logprobs, other.logprobs, work.choice_ids, strict=True)
    return max(abs(a - b) / len(ids) for ours, theirs, own in rows for a, b, ids in zip(ours, theirs, own, strict=True))
