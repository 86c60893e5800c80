"""A job in numbers, for scripts: what the report shows, as plain values."""

from dataclasses import asdict
from typing import Any

from batchrun.report.facts import Facts

_FORMAT = 1


def summarised(facts: Facts) -> dict[str, Any]:
    """For JSON. Times are in seconds, rates are shares of 1, tokens and bytes are those of all runs together."""
    now, total = facts.status, facts.series.total
    counters = {} if total is None else asdict(total.counters)
    seconds = facts.series.seconds
    return {
        "format": _FORMAT,
        "output": now.output,
        "status": now.status,
        "request_counts": asdict(now.request_counts),
        "errors": now.errors,
        "error_examples": [asdict(row) for row in facts.results.errors],
        "finish_reasons": facts.results.finish_reasons,
        "model": facts.series.runs[-1].facts.get("model") if facts.series.runs else None,
        "run_s": seconds,
        "output_tokens_per_s": counters.get("output_tokens", 0) / seconds if seconds else 0.0,
        "hit_rate": total.counters.hit_rate if total else 0.0,
        "kv_usage": {"mean": total.kv_usage, "peak": total.kv_peak} if total else None,
        "peak_kv_bytes": facts.series.peak_kv_bytes,
        "counters": counters,
        "latencies": total.latencies.summary() if total else {},
        "compared": [asdict(each) | {"ratio": each.ratio} for each in facts.compared],
        "alerts": [asdict(verdict) | {"fires": verdict.fires} for verdict in facts.verdicts],
        "slowest_rows": [asdict(row) for row in total.slowest] if total else [],
        "prefixes": [asdict(prefix) | {"saved_tokens": prefix.saved_tokens} for prefix in facts.prefixes],
        "runs": [
            {"at": run.at, "load_s": run.load_s, "run_s": run.seconds, "ended_at": run.ended_at, "ended": run.ended}
            | run.facts
            for run in facts.series.runs
        ],
    }
