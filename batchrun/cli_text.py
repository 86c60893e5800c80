"""The pieces that the reports on the command line are made of. The standard library only: `status` must be quick."""

from collections.abc import Mapping
from typing import Any

from batchrun.observe.duration import duration

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


def size(num_bytes: int) -> str:
    """In the largest binary unit that leaves a number above 1: 512B, 22.5KiB, 4.0GiB."""
    value, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f}{units[0]}" if units[0] == "B" else f"{value:.1f}{units[0]}"


def latency_lines(latencies: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A line for each of the latencies that was measured, as `Latencies.summary` has them: its percentiles."""
    return [
        (title, joined(*(f"{name} {_short(measured[name])}" for name in ("p50", "p90", "p99"))))
        for key, title in _LATENCIES.items()
        if (measured := latencies.get(key, {})).get("count")
    ]


def _short(seconds: float) -> str:
    """1.23ms, 45.6ms, 1.23s, 45.6s, 12m05s."""
    if seconds >= 60:
        return duration(seconds)
    value, unit = (seconds, "s") if seconds >= 0.9995 else (seconds * 1000, "ms")
    return f"{value:.3g}{unit}" if value >= 0.01 else "0ms"
