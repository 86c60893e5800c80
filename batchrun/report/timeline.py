"""Where a moment of a job lies in a picture: runs one after the other, the gaps between them shown but not to scale.

A job may run for minutes and lie still for a night: its runs share the width by their length, each gap gets the same.
"""

from dataclasses import dataclass

from batchrun.report.series import Run, Series

_GAP = 14.0  # of the picture's width


@dataclass(frozen=True, slots=True)
class Placed:
    """A run from `left` to `right`; `began_s` is how long the engine had run before it."""

    run: Run
    left: float
    right: float
    began_s: float

    def x(self, seconds: float) -> float:
        """Where so many seconds after the run's begin lie."""
        return self.left + (self.right - self.left) * seconds / self.run.seconds


@dataclass(frozen=True, slots=True)
class Gap:
    """Nothing ran for `seconds` between `left` and `right`."""

    left: float
    right: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """Runs and gaps from left to right, over a width."""

    runs: tuple[Placed, ...]
    gaps: tuple[Gap, ...]
    seconds: float  # that the engine ran


def place(series: Series, left: float, width: float) -> Timeline:
    """The runs that have samples, over `width` from `left` on."""
    runs = [run for run in series.runs if run.seconds > 0]
    gap = min(_GAP, width / (4 * max(len(runs), 1)))
    total = sum(run.seconds for run in runs)
    scale = (width - gap * (len(runs) - 1)) / total if total else 0.0
    placed: list[Placed] = []
    gaps = []
    x, began_s = left, 0.0
    for run in runs:
        if placed:
            before = placed[-1].run
            gaps.append(Gap(x, x + gap, max(0.0, run.at + run.load_s - before.ended_at)))
            x += gap
        placed.append(Placed(run, x, x + run.seconds * scale, began_s))
        x, began_s = placed[-1].right, began_s + run.seconds
    return Timeline(tuple(placed), tuple(gaps), total)
