"""What was measured, as a table for people and as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from batchrun_jobs.bench.agreement import Agreement
from batchrun_jobs.bench.floor import Floor
from batchrun_jobs.bench.measured import Measured
from batchrun_jobs.bench.workload import Workload

_HEADER = (
    "way", "run s", "min-max", "rows/s", "out tok/s", "tok/s", "computed", "useful", "peak MiB", "ready s", "ratio",
    "x floor", "equal", "ties", "others",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """A way's line. Seconds, rates, memory and shares are medians over its runs; None: not known.

    `computed` is the share of the workload's prompt tokens that were computed, `ratio` the way's time to that of the
    first way, `over_floor` to the floor. `tokens_per_s` counts prompts and answers, shared or not; `others` is the
    most that others used of the machine during one of the runs.
    """

    way: str
    run_s: float
    fastest_s: float
    slowest_s: float
    rows_per_s: float
    output_tokens_per_s: float
    tokens_per_s: float
    computed: float | None
    useful: float | None
    peak_rss_bytes: float | None
    ready_s: float
    ratio: float
    over_floor: float | None
    others: float | None
    agreement: Agreement


def rows(
    runs: Mapping[str, Sequence[Measured]],
    agreements: Mapping[str, Agreement],
    workload: Workload,
    floor_s: float | None,
) -> list[Row]:
    """A row for each way, in their order; every way has a run at least."""
    base_s = median(run.run_s for run in next(iter(runs.values())))
    return [_row(way, measured, agreements[way], workload, base_s, floor_s) for way, measured in runs.items()]


def text(rows: Sequence[Row]) -> str:
    """Aligned columns, a line a way."""
    lines = [_HEADER, *(_cells(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        for cells in lines
    )


def floor_text(floor: Floor) -> str:
    """Where the floor comes from; a line."""
    usual, least = floor.usual, floor.least
    seen = [rates.flops_per_s / 1e9 for rates in floor.rates]
    limit = f"; registers alone {usual.multiply_adds_per_s / 1e9:.0f}" if usual.multiply_adds_per_s else ""
    return (
        f"floor {floor.seconds:.2f} s: {least.flops / 1e12:.3f} TFLOP at {usual.flops_per_s / 1e9:.0f} GFLOP/s "
        f"({min(seen):.0f} to {max(seen):.0f} between the runs{limit}), "
        f"or {least.num_bytes / 1e9:.1f} GB at {usual.bytes_per_s / 1e9:.1f} GB/s"
    )


def as_json(rows: Sequence[Row], runs: Mapping[str, Sequence[Measured]], floor: Floor | None) -> dict[str, Any]:
    """The same, with every run's times and answers."""
    ways = [asdict(row) | {"runs": [asdict(run) for run in runs[row.way]]} for row in rows]
    return {"ways": ways, "floor_s": floor.seconds if floor else None, "floor": asdict(floor) if floor else None}


def _row(
    way: str,
    measured: Sequence[Measured],
    agreement: Agreement,
    workload: Workload,
    base_s: float,
    floor_s: float | None,
) -> Row:
    times = [run.run_s for run in measured]
    run_s = median(times)
    computed = _known([run.computed_tokens for run in measured])
    return Row(
        way=way,
        run_s=run_s,
        fastest_s=min(times),
        slowest_s=max(times),
        rows_per_s=workload.num_rows / run_s,
        output_tokens_per_s=workload.output_tokens / run_s,
        tokens_per_s=(workload.prompt_tokens + workload.output_tokens) / run_s,
        computed=None if computed is None else computed / workload.prompt_tokens,
        useful=_known([run.useful for run in measured]),
        peak_rss_bytes=_known([run.peak_rss for run in measured]),
        ready_s=median(run.ready_s for run in measured),
        ratio=run_s / base_s,
        over_floor=None if floor_s is None else run_s / floor_s,
        others=max((run.others for run in measured if run.others is not None), default=None),
        agreement=agreement,
    )


def _known(values: Sequence[float | None]) -> float | None:
    """The median, where every run has told."""
    told = [value for value in values if value is not None]
    return median(told) if len(told) == len(values) else None


def _cells(row: Row) -> tuple[str, ...]:
    agreement = row.agreement
    num_rows = agreement.num_equal + agreement.num_ties + len(agreement.wrong)
    return (
        row.way,
        f"{row.run_s:.2f}",
        f"{row.fastest_s:.2f}-{row.slowest_s:.2f}",
        f"{row.rows_per_s:.2f}",
        f"{row.output_tokens_per_s:.1f}",
        f"{row.tokens_per_s:.0f}",
        _or_dash(row.computed, "{:.1%}"),
        _or_dash(row.useful, "{:.0%}"),
        _or_dash(row.peak_rss_bytes and row.peak_rss_bytes / (1 << 20), "{:.0f}"),
        f"{row.ready_s:.1f}",
        f"{row.ratio:.2f}",
        _or_dash(row.over_floor, "{:.2f}"),
        f"{agreement.num_equal}/{num_rows}",
        str(agreement.num_ties),
        _or_dash(row.others, "{:.0%}"),
    )


def _or_dash(value: float | None, pattern: str) -> str:
    return "-" if value is None else pattern.format(value)
