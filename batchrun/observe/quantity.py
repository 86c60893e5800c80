"""Bytes and short times as people write them. The standard library only."""

from batchrun.observe.duration import duration


def size(num_bytes: int) -> str:
    """In the largest binary unit that leaves a number above 1: 512B, 22.5KiB, 4.0GiB."""
    value, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f}{units[0]}" if units[0] == "B" else f"{value:.1f}{units[0]}"


def short_duration(seconds: float) -> str:
    """1.23ms, 45.6ms, 1.23s, 45.6s, 12m05s."""
    if seconds >= 60:
        return duration(seconds)
    value, unit = (seconds, "s") if seconds >= 0.9995 else (seconds * 1000, "ms")
    return f"{value:.3g}{unit}" if value >= 0.01 else "0ms"
