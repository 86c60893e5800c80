"""Which pictures the report has, and in a few words what to see in each."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from batchrun.observe.quantity import short_duration
from batchrun.report.charts import Line, histogram, line_chart
from batchrun.report.facts import Facts, best_hit_rate
from batchrun.report.series import Sample


@dataclass(frozen=True, slots=True)
class Key:
    """An entry of a picture's legend."""

    kind: str
    label: str


@dataclass(frozen=True, slots=True)
class Figure:
    """A picture with its heading, and in a few words what to see in it."""

    title: str
    svg: Markup
    said: str
    keys: tuple[Key, ...] = ()


def over_time(facts: Facts) -> list[Figure]:
    """What happened over time."""
    series, total = facts.series, facts.series.total
    if total is None:
        return []

    def rate(count: str) -> Any:
        return lambda sample: getattr(sample.counters, count) / sample.seconds if sample.seconds else None

    def waited(which: str, percent: float) -> Any:
        return lambda sample: getattr(sample.latencies, which).percentile(percent)

    def share(value: float) -> str:
        return f"{value:.0%}"

    def tick(value: float) -> str:
        return f"{value:,.0f}s" if value >= 1 else short_duration(value)

    def plain(value: float) -> str:
        if value >= 10_000:
            return f"{value / 1000:,.4g}k"
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"

    computed = Line("prompt tokens computed", "b", rate("computed_prompt_tokens"))
    output = Line("output tokens", "a", rate("output_tokens"), is_filled=True)
    running = Line("running", "a", lambda sample: sample.num_running, is_filled=True)
    num_rows = facts.plan.get("num_rows", 0)
    left = Line("left", "a", lambda sample: float(num_rows - sample.rows_done), is_filled=True)
    cores = Line(
        "cores", "a", lambda sample: sample.busy_s / sample.seconds if sample.seconds else None, is_filled=True
    )
    most_rows = series.runs[-1].facts.get("max_num_seqs", 0)
    usage = Line("mean", "a", lambda sample: sample.kv_usage, is_filled=True)
    peak = Line("peak", "b", lambda sample: sample.kv_peak)
    hits = Line("hit rate", "a", _hit_rate, is_filled=True)
    preempted = Line("rows a second", "c", rate("preemptions"), is_filled=True)
    best = best_hit_rate(facts.plan, total.counters.prompt_tokens)

    def figure(title: str, said: str, lines: list[Line], write: Any, **options: Any) -> Figure:
        keys = tuple(Key(line.kind, line.label) for line in lines)
        return Figure(title, line_chart(series, lines, write, title=title, **options), said, keys)

    latencies = total.latencies
    return [
        figure("Throughput", "tokens a second", [output, computed], plain),
        figure("Batch", f"rows at a time; dashed: at most {most_rows:,}", [running], plain, top=1.25 * most_rows,
               limit=most_rows),
        figure("Queue", "rows of the job that have no result yet", [left], plain),
        figure("KV pool", "share in use; dashed: where an alert begins", [usage, peak], share, top=1.0, limit=0.85),
        figure("Prefix hits", f"share of prompt tokens; dashed: {best:.0%} at most", [hits], share, top=1.0,
               limit=best),
        figure("Time to first token", _percentiles(latencies.first_token), [
            Line("p50", "a", waited("first_token", 50)), Line("p99", "b", waited("first_token", 99))
        ], tick, is_log=True),
        figure("Time per token", _percentiles(latencies.per_token), [
            Line("p50", "a", waited("per_token", 50)), Line("p99", "b", waited("per_token", 99))
        ], tick, is_log=True),
        figure("Preemptions", "rows a second that had to leave the batch", [preempted], plain),
        figure("Processor", "cores that the process kept busy", [cores], plain),
    ]  # fmt: skip


def _hit_rate(sample: Sample) -> float | None:
    return sample.counters.hit_rate if sample.counters.prompt_tokens else None


def _percentiles(waits: Any) -> str:
    found = [(percent, waits.percentile(percent)) for percent in (50, 90, 99)]
    named = [f"p{percent} {short_duration(value)}" for percent, value in found if value is not None]
    return "over all: " + ", ".join(named) if named else "no row has got there"


def lengths(facts: Facts) -> list[Figure]:
    """How long prompts and answers are."""
    pairs = [
        ("Prompt lengths", "b", facts.results.prompt_lengths),
        ("Answer lengths", "a", facts.results.output_lengths),
    ]
    return [
        Figure(title, histogram(counts, kind, title=title), _of_lengths(counts))
        for title, kind, counts in pairs
        if counts.sum()
    ]


def _of_lengths(counts: NDArray[np.int64]) -> str:
    """Mean and extremes of lengths that are counted by length."""
    lengths, num = np.flatnonzero(counts), counts.sum()
    mean = float((np.arange(len(counts)) * counts).sum() / num)
    return f"tokens; mean {mean:,.1f}, from {lengths[0]:,} to {lengths[-1]:,}"
