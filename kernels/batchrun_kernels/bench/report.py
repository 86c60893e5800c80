"""What was measured, as lines of a table and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from batchrun_kernels.bench.case import Case
from batchrun_kernels.bench.ceiling import Ceiling
from batchrun_kernels.bench.measure import Timing

_SIZE_WIDTH = 34


@dataclass(frozen=True, slots=True)
class Measured:
    """A case that was timed; the first timing is ours. Or refused, then `refusal` says why and nothing was timed."""

    case: Case
    ceiling: Ceiling
    timings: tuple[Timing, ...] = ()
    error: float | None = None
    refusal: str | None = None

    @property
    def over_floor(self) -> float:
        """Our median to the floor."""
        return self.timings[0].median_s / self.ceiling.floor_s(self.case)

    @property
    def gain(self) -> float | None:
        """The fastest other way's median to ours; above 1 ours is faster."""
        others = [timing.median_s for timing in self.timings[1:]]
        return min(others) / self.timings[0].median_s if others else None


def ceiling_line(ceiling: Ceiling) -> str:
    return f"memory is read at {ceiling.bytes_per_s / 1e9:.1f} GB/s, computed {ceiling.flops_per_s / 1e9:.0f} GFLOP/s"


def header(measured: Measured) -> str:
    """The line above an operation's first."""
    ways = "".join(f"{timing.way + ' ms (best)':>24}" for timing in measured.timings)
    return f"{measured.case.operation:{_SIZE_WIDTH}}{'floor ms':>16}{ways}{'x floor':>9}{'gain':>7}"


def line(measured: Measured) -> str:
    case = measured.case
    if measured.refusal is not None:
        return f"{case.size:{_SIZE_WIDTH}} not timed: {measured.refusal}"
    bound = "memory" if measured.ceiling.is_memory_bound(case) else "compute"
    floor = f"{measured.ceiling.floor_s(case) * 1e3:.3f} {bound}"
    ways = "".join(
        f"{timing.median_s * 1e3:15.3f} ({timing.best_s * 1e3:.3f})".rjust(24) for timing in measured.timings
    )
    gain = "" if measured.gain is None else f"{measured.gain:.2f}"
    return f"{case.size:{_SIZE_WIDTH}}{floor:>16}{ways}{measured.over_floor:9.2f}{gain:>7}"


def as_json(found: Sequence[Measured], num_threads: int) -> dict[str, Any]:
    """Times in seconds; one entry a case."""
    cases = [
        {
            "operation": one.case.operation,
            "size": one.case.size,
            "bytes": one.case.num_bytes,
            "flops": one.case.num_flops,
            "floor_s": one.ceiling.floor_s(one.case),
            "error": one.error,
            "refusal": one.refusal,
            "timings": [asdict(timing) for timing in one.timings],
        }
        for one in found
    ]
    ceilings = [asdict(ceiling) for ceiling in dict.fromkeys(one.ceiling for one in found)]
    return {"threads": num_threads, "ceilings": ceilings, "cases": cases}
