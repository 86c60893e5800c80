"""Pictures as inline SVG: lines over time, bars of lengths, the map of shared prefixes.

Colours are classes that the page's style sheet defines, so that a picture is right in the light, in the dark and on
paper. What comes from data goes through `escape`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

from batchrun.observe.duration import duration
from batchrun.observe.printable import one_line
from batchrun.plan.prefixes import SharedPrefix
from batchrun.report.series import Sample, Series
from batchrun.report.timeline import Timeline, place

_WIDTH, _HEIGHT = 360, 160
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 10, 24
_FLOOR = _HEIGHT - _BOTTOM
_BINS = 24
_LEVEL_HEIGHT = 26


@dataclass(frozen=True, slots=True)
class Line:
    """One figure over time: `value` of a sample, None where it has none; `kind` is its class in the style sheet."""

    label: str
    kind: str
    value: Callable[[Sample], float | None]
    is_filled: bool = False


def line_chart(
    series: Series,
    lines: Sequence[Line],
    write: Callable[[float], str],
    *,
    title: str,
    top: float | None = None,
    limit: float | None = None,
    is_log: bool = False,
) -> Markup:
    """The lines over the job's time; `write` spells a value, `limit` is drawn as a line to stay below.

    The highest value shown is `top`, where given.
    """
    time = place(series, _LEFT, _WIDTH - _LEFT - _RIGHT)
    values = [value for sample in series.samples for line in lines if (value := line.value(sample)) is not None]
    scale = _log_scale(values) if is_log else _linear_scale(values, top)
    body = [_grid(scale, write), _gaps(time), _times(time)]
    if limit is not None:
        body.append(f'<line class="limit" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{scale.y(limit):.1f}" '
                    f'y2="{scale.y(limit):.1f}"/>')  # fmt: skip
    body += [_path(time, line, scale) for line in lines]
    return _svg(title, "".join(body))


def histogram(counts: NDArray[np.int64], kind: str, *, title: str) -> Markup:
    """`counts[n]` things have the length n: bars of neighbouring lengths together."""
    used = np.flatnonzero(counts)
    if not len(used):
        return Markup("")
    width = _nice_width((int(used[-1]) + 1) / _BINS)
    bins = np.add.reduceat(counts, np.arange(0, len(counts), width))
    scale = _linear_scale([float(bins.max())], None)
    step = (_WIDTH - _LEFT - _RIGHT) / len(bins)
    bars = []
    for at, count in enumerate(bins.tolist()):
        if count:
            y = min(scale.y(count), _FLOOR - 1.0)
            label = f"{at * width:,} to {(at + 1) * width - 1:,} tokens: {count:,}"
            bars.append(
                f'<rect class="bar {kind}" x="{_LEFT + at * step:.1f}" y="{y:.1f}" width="{max(step - 1, 0.8):.1f}" '
                f'height="{_FLOOR - y:.1f}"><title>{label}</title></rect>'
            )
    ends = [(0, "start"), (len(bins) // 2, "middle"), (len(bins), "end")]
    ticks = "".join(_text(_LEFT + at * step, _HEIGHT - 8, f"{at * width:,}", anchor) for at, anchor in ends)
    return _svg(title, _grid(scale, "{:,.0f}".format) + "".join(bars) + ticks)


def prefix_map(prefixes: Sequence[SharedPrefix], num_rows: int, *, title: str) -> Markup:
    """Every prefix as wide as it has rows, below the one that it goes on from; darker where it saves more.

    Widths are in percent, so that the text keeps its size whatever the page's width.
    """
    if not prefixes or not num_rows:
        return Markup("")
    most = max(prefix.saved_tokens for prefix in prefixes)
    boxes = []
    for prefix in prefixes:
        label = f"{prefix.num_rows:,} rows share {prefix.length:,} tokens; saves {prefix.saved_tokens:,}"
        text = escape(one_line(prefix.text))
        boxes.append(
            f'<svg x="{100 * prefix.first / num_rows:.3f}%" y="{prefix.level * _LEVEL_HEIGHT}" '
            f'width="{100 * prefix.num_rows / num_rows:.3f}%" height="{_LEVEL_HEIGHT - 2}">'
            f"<title>{label}: {text}</title>"
            f'<rect class="prefix" width="100%" height="100%" '
            f'fill-opacity="{0.18 + 0.5 * prefix.saved_tokens / most:.2f}"/>'
            f'<text x="6" y="16">{text}</text></svg>'
        )
    height = (1 + max(prefix.level for prefix in prefixes)) * _LEVEL_HEIGHT
    body = f"<title>{escape(title)}</title>{''.join(boxes)}"
    return Markup(f'<svg class="map" role="img" width="100%" height="{height}">{body}</svg>')


@dataclass(frozen=True, slots=True)
class _Scale:
    """`low` at the floor of the picture, `high` at its top."""

    low: float
    high: float
    ticks: tuple[float, ...]
    is_log: bool = False

    def y(self, value: float) -> float:
        low, high, at = self.low, self.high, min(max(value, self.low), self.high)
        if self.is_log:
            low, high, at = log10(low), log10(high), log10(at)
        return _FLOOR - (_FLOOR - _TOP) * (at - low) / (high - low)


def _linear_scale(values: Sequence[float], top: float | None) -> _Scale:
    high = top or _nice_top(max(values, default=0.0))
    return _Scale(0.0, high, (0.0, high / 2, high))


def _log_scale(values: Sequence[float]) -> _Scale:
    positive = [value for value in values if value > 0] or [1.0]
    low, high = floor(log10(min(positive))), ceil(log10(max(positive)))
    high = max(high, low + 1)
    step = max(1, ceil((high - low) / 4))
    return _Scale(10.0**low, 10.0**high, tuple(10.0**power for power in range(low, high + 1, step)), is_log=True)


def _nice_top(value: float) -> float:
    """A round number that is not smaller."""
    if value <= 0:
        return 1.0
    unit = 10.0 ** floor(log10(value))
    return next(unit * step for step in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if unit * step >= value)


def _nice_width(value: float) -> int:
    return max(1, ceil(_nice_top(value)))


def _grid(scale: _Scale, write: Callable[[float], str]) -> str:
    return "".join(
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{scale.y(tick):.1f}" y2="{scale.y(tick):.1f}"/>'
        + _text(_LEFT - 6, scale.y(tick) + 4, write(tick), "end")
        for tick in scale.ticks
    )


def _gaps(time: Timeline) -> str:
    """Where nothing ran, hatched."""
    return "".join(
        f'<rect class="gap" x="{gap.left:.1f}" y="{_TOP}" width="{gap.right - gap.left:.1f}" '
        f'height="{_FLOOR - _TOP}"><title>nothing ran for {duration(gap.seconds)}</title></rect>'
        for gap in time.gaps
    )


def _times(time: Timeline) -> str:
    """How long the engine had run, at both ends and in the middle."""
    if not time.runs:
        return ""
    half = time.seconds / 2
    middle = next(placed for placed in time.runs if placed.began_s + placed.run.seconds >= half)
    ticks = [
        (_LEFT, "0s", "start"),
        (middle.x(half - middle.began_s), duration(half), "middle"),
        (_WIDTH - _RIGHT, duration(time.seconds), "end"),
    ]
    return "".join(_text(x, _HEIGHT - 8, label, anchor) for x, label, anchor in ticks)


def _path(time: Timeline, line: Line, scale: _Scale) -> str:
    drawn = []
    for placed in time.runs:
        points = list(_points(placed.run.samples, line))
        if not points:
            continue
        # As far as the run goes to both sides: what a sample says is true of all its time.
        points = [(0.0, points[0][1]), *points, (placed.run.seconds, points[-1][1])]
        spots = " ".join(f"{placed.x(seconds):.1f},{scale.y(value):.1f}" for seconds, value in points)
        if line.is_filled:
            area = f"{placed.left:.1f},{_FLOOR} {spots} {placed.right:.1f},{_FLOOR}"
            drawn.append(f'<polygon class="area {line.kind}" points="{area}"/>')
        drawn.append(f'<polyline class="line {line.kind}" points="{spots}"/>')
    return "".join(drawn)


def _points(samples: Sequence[Sample], line: Line) -> Iterator[tuple[float, float]]:
    """(seconds of the run, value) in the middle of every sample."""
    seconds = 0.0
    for sample in samples:
        value = line.value(sample)
        if value is not None:
            yield seconds + sample.seconds / 2, value
        seconds += sample.seconds


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(title: str, body: str) -> Markup:
    return Markup(f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img"><title>{escape(title)}</title>{body}</svg>')
