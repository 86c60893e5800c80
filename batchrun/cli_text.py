"""The pieces that the reports on the command line are made of. The standard library only: `status` must be quick."""

from collections.abc import Mapping, Sequence
from typing import Any

from batchrun.observe.quantity import short_duration
from batchrun.observe.quantity import size as size
from batchrun.report.compared import Compared

_LATENCIES = {
    "queue_time_s": "queued",
    "time_to_first_token_s": "first token",
    "time_per_output_token_s": "per token",
}


def aligned(lines: list[tuple[str, str]]) -> str:
    """Names and values in two columns; a value's further lines stand under its first."""
    width = max(len(name) for name, _ in lines) + 2
    return "\n".join(f"{name:{width}}" + value.replace("\n", "\n" + " " * width) for name, value in lines)


def joined(*parts: str) -> str:
    """The parts that say something, with a dot between."""
    return " · ".join(part for part in parts if part)


def failed(errors: Mapping[str, int]) -> str:
    """ "3 failed (overlong_prompt 2, template_error 1)", or nothing."""
    if not errors:
        return ""
    by_count = sorted(errors.items(), key=lambda item: (-item[1], item[0]))
    return f"{sum(errors.values()):,} failed ({', '.join(f'{name} {count:,}' for name, count in by_count)})"


def latency_lines(latencies: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A line for each of the latencies that was measured, as `Latencies.summary` has them: its percentiles."""
    return [
        (title, joined(*(f"{name} {short_duration(measured[name])}" for name in ("p50", "p90", "p99"))))
        for key, title in _LATENCIES.items()
        if (measured := latencies.get(key, {})).get("count")
    ]


def compared_lines(compared: Sequence[Compared]) -> list[tuple[str, str]]:
    """A line for each figure that was foretold, with what came."""
    foretold = [each for each in compared if each.predicted is not None]
    lines = [f"{each.name} {_amount(each, each.predicted)} · came to {_amount(each, each.actual)}" for each in foretold]
    return [("foretold" if at == 0 else "", line) for at, line in enumerate(lines)]


def _amount(each: Compared, value: float | None) -> str:
    match each.unit:
        case "bytes":
            return size(round(value or 0))
        case "seconds":
            return short_duration(value or 0.0)
        case _:
            return f"{value or 0:,.0f}"
