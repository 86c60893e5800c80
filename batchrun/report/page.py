"""The report as one HTML page: no script, nothing from elsewhere, every text from data escaped.

Decides what is said; how it looks is the template's and the pictures' affair.
"""

import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from batchrun import __version__
from batchrun.observe.duration import duration
from batchrun.observe.printable import printable
from batchrun.observe.quantity import short_duration, size
from batchrun.report.charts import prefix_map
from batchrun.report.compared import Compared
from batchrun.report.facts import Facts
from batchrun.report.figures import lengths, over_time
from batchrun.report.series import Run
from batchrun.store.status import StatusWord

_HEADLINES: Mapping[StatusWord, tuple[str, str]] = {
    "completed": ("good", "Complete"),
    "in_progress": ("busy", "Running"),
    "finalizing": ("busy", "Being published"),
    "validating": ("busy", "Being planned"),
    "cancelling": ("busy", "Being cancelled"),
    "planned": ("busy", "Planned, not run yet"),
    "cancelled": ("warn", "Cancelled; resume goes on from there"),
    "interrupted": ("warn", "Interrupted; resume goes on from there"),
    "failed": ("bad", "Failed"),
    "output_missing": ("bad", "Complete, but its result is not there any more"),
}
_MOST_PREFIXES = 8
_WORDS_OF_STATE = {"ok": "ok", "hint": "hint", "alert": "alert", "unknown": "not measured"}


def render(facts: Facts) -> str:
    """The page."""
    return template().render(
        facts=facts,
        name=Path(facts.status.output).name,
        headline=_headline(facts),
        tiles=_tiles(facts),
        shares=_time_shares(facts),
        figures=over_time(facts),
        lengths=lengths(facts),
        reasons=_finish_reasons(facts),
        prefixes=_prefixes(facts),
        prefix_map=prefix_map(facts.prefixes, facts.plan.get("num_unique", 0), title="shared prefixes"),
        compared=[_compared(each) for each in facts.compared],
        runs=_runs(facts),
        options=_options(facts.job),
        words_of_state=_WORDS_OF_STATE,
        version=__version__,
        written=_moment(time.time()),
    )


@cache
def template() -> Template:
    """The page's, compiled once a process."""
    environment = Environment(
        loader=PackageLoader("batchrun.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_safe,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"n": "{:,}".format, "size": size, "duration": duration, "short": short_duration}
    return environment.get_template("template.html.j2")


def _safe(value: object) -> object:
    """Characters that are no text, such as a terminal's escapes, are spelled out."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _headline(facts: Facts) -> dict[str, Any]:
    """The state of the job in one line, and one more that says whether to worry."""
    kind, title = _HEADLINES[facts.status.status]
    counts = facts.status.request_counts
    done = counts.completed + counts.failed
    rows = f"{done:,} rows" if counts.total is None else f"{done:,} of {counts.total:,} rows"
    if counts.total == done:
        rows = f"all {done:,} rows"
    said = [f"{rows} done" + (f", {counts.failed:,} of them failed" if counts.failed else ", none failed")]
    if counts.failed and kind == "good":
        kind, title = "warn", f"Complete, with {_counted(counts.failed, 'failed row')}"
    if facts.status.status == "failed" and "error" in facts.status.progress:
        said.append(facts.status.progress["error"]["message"])
    alerts = sum(verdict.state == "alert" for verdict in facts.verdicts)
    hints = sum(verdict.state == "hint" for verdict in facts.verdicts)
    if facts.verdicts:
        found = [_counted(alerts, "alert"), _counted(hints, "hint")]
        said.append(" and ".join(filter(None, found)) or "no alert")
    return {"kind": kind, "title": title, "said": said}


def _counted(number: int, name: str) -> str:
    return f"{number:,} {name}{'' if number == 1 else 's'}" if number else ""


def _tiles(facts: Facts) -> list[tuple[str, str, str]]:
    """(name, figure, what it means): the figures to see first."""
    total, plan = facts.series.total, facts.plan
    if total is None:
        return []
    counters, seconds = total.counters, max(total.seconds, 1e-9)
    computed = counters.computed_tokens / seconds
    limit = facts.series.runs[-1].facts.get("max_num_seqs", 0)
    saved = counters.cached_tokens
    runs = _counted(len(facts.series.runs), "run")
    return [
        ("Time", duration(total.seconds), f"in the engine, {runs}"),
        ("Output", f"{counters.output_tokens / seconds:,.0f}", f"tokens/s, {counters.output_tokens:,} in all"),
        ("Computed", f"{computed:,.0f}", f"tokens/s in {counters.steps:,} steps"),
        ("Prefix hits", f"{counters.hit_rate:.0%}", f"{saved:,} of {counters.prompt_tokens:,} prompt tokens"),
        ("Batch", f"{total.num_running:,.0f}", f"rows at a time, {limit:,} at most"),
        ("KV pool", f"{total.kv_usage:.0%}", f"in use, {total.kv_peak:.0%} at most"),
        ("Preempted", f"{counters.preemptions:,}", f"{counters.recomputed_tokens:,} tokens computed twice"),
        ("Copies", f"{plan.get('num_duplicates', 0):,}", "rows that got another row's answer"),
    ]


def _time_shares(facts: Facts) -> list[dict[str, Any]]:
    """Where the time from the first begin to the last word went: loading, running, lying still."""
    runs = facts.series.runs
    if not runs:
        return []
    load_s = sum(run.load_s for run in runs)
    run_s = facts.series.seconds
    still_s = max(0.0, runs[-1].ended_at - runs[0].at - load_s - run_s)
    parts = [("run", "running", run_s), ("load", "loading", load_s), ("still", "nothing ran", still_s)]
    whole = sum(seconds for _, _, seconds in parts) or 1.0
    return [
        {"kind": kind, "label": label, "seconds": seconds, "share": seconds / whole}
        for kind, label, seconds in parts
        if seconds / whole >= 0.005
    ]


def _finish_reasons(facts: Facts) -> list[dict[str, Any]]:
    """Why rows ended, the most frequent first."""
    meanings = {
        "stop": "ended by themselves", "length": "cut off at --max-tokens", "error": "failed", "abort": "given up",
    }  # fmt: skip
    reasons = sorted(facts.results.finish_reasons.items(), key=lambda item: -item[1])
    whole = sum(count for _, count in reasons) or 1
    return [
        {"name": name, "meaning": meanings.get(name, ""), "count": count, "share": count / whole}
        for name, count in reasons
    ]


def _prefixes(facts: Facts) -> dict[str, Any]:
    """The prefixes that save most, and what the others save together."""
    best = sorted(facts.prefixes, key=lambda prefix: -prefix.saved_tokens)[:_MOST_PREFIXES]
    plan = facts.plan
    saved = plan.get("prompt_tokens", 0) - plan.get("unique_prompt_tokens", 0)
    return {
        "best": best,
        "num_others": len(facts.prefixes) - len(best),
        "saved": saved,
        "share": saved / plan["prompt_tokens"] if plan.get("prompt_tokens") else 0.0,
        "others": saved - sum(prefix.saved_tokens for prefix in best),
    }


def _compared(each: Compared) -> dict[str, Any]:
    spell: Mapping[str, Any] = {"bytes": lambda value: size(round(value)), "seconds": short_duration}
    write = spell.get(each.unit, lambda value: f"{value:,.0f}")
    ratio = each.ratio
    return {
        "name": each.name,
        "predicted": None if each.predicted is None else write(each.predicted),
        "actual": write(each.actual),
        "ratio": "" if ratio is None else f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.0f}x",
        "is_off": ratio is not None and ratio > 1.2,
    }


def _runs(facts: Facts) -> list[dict[str, Any]]:
    runs, is_held = facts.series.runs, facts.status.holder is not None
    return [
        _run(run, before, "in progress" if is_held and run is runs[-1] else "interrupted")
        for run, before in zip(runs, (None, *runs), strict=False)
    ]


def _run(run: Run, before: Run | None, unended: str) -> dict[str, Any]:
    """`unended` is the word for one that has not said how it ended."""
    total, ended = run.total, run.ended or unended
    return {
        "at": _moment(run.at),
        "ended": ended,
        "is_bad": ended in ("interrupted", "failed"),
        "idle_s": max(0.0, run.at - before.ended_at) if before else 0.0,
        "load_s": run.load_s,
        "seconds": run.seconds,
        "output_tokens": total.counters.output_tokens if total else 0,
        "rows": total.counters.rows_finished if total else 0,
        "num_workers": run.facts.get("num_workers", 1),
    }


def _moment(seconds: float) -> str:
    """In the time zone of whoever writes the report."""
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")


def _options(job: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the job was told, as far as it was told anything; long texts are shown whole."""
    told: Sequence[tuple[str, Any]] = [
        (name, value) for name, value in job.items() if value not in (None, [], "", False)
    ]
    return [(name, ", ".join(map(str, value)) if isinstance(value, list) else str(value)) for name, value in told]
