"""The runs of the ways: each in a child of its own, one after another, by turns."""

from dataclasses import dataclass
from typing import Any

from batchrun_jobs.bench.process import Ended, Processes
from batchrun_jobs.bench.way import Way
from batchrun_jobs.bench.workload import Workload


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of a way.

    `ready_s` passed from the start of its process until it was handed the first row, `run_s` from then on until it
    had given back the last one. `peak_rss` is in bytes, `computed_tokens` are prompt tokens, `useful` is a share of 1
    and `latencies` are percentiles in seconds by what rows waited for; None where the way does not tell. `others` is
    the share of the machine's processors that others used meanwhile.
    """

    ready_s: float
    run_s: float
    token_ids: tuple[tuple[int, ...], ...]
    computed_tokens: int | None
    useful: float | None
    peak_rss: int | None
    others: float | None
    latencies: dict[str, dict[str, float]] | None = None

    @classmethod
    def of(cls, ended: Ended) -> "Measured":
        found: dict[str, Any] = ended.returned
        return cls(
            ready_s=found["began"] - ended.started,
            run_s=found["ended"] - found["began"],
            token_ids=tuple(map(tuple, found["token_ids"])),
            computed_tokens=found["computed_tokens"],
            useful=found["useful"],
            peak_rss=found["peak_rss"],
            others=ended.others,
            latencies=found.get("latencies"),
        )


def measure(way: Way, workload: Workload, processes: Processes) -> Measured:
    """Runs a way once, to its end; raises ChildFailedError."""
    return Measured.of(processes.run(way.script, way.python, workload, dict(way.options)))
