"""What the plan foretold of a run against what came. The standard library only: `status` says it too."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from batchrun.report.series import Series, read
from batchrun.store.layout import Layout, read_hint

Unit = Literal["tokens", "steps", "bytes", "seconds"]


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure; `predicted` is None where nothing foretold it."""

    name: str
    unit: Unit
    predicted: float | None
    actual: float

    @property
    def ratio(self) -> float | None:
        """Actual by predicted."""
        return self.actual / self.predicted if self.predicted else None


def compare(at: Layout) -> tuple[Compared, ...]:
    """What was foretold of the job in this folder and what came, so far; nothing before it has run.

    Actual figures are of all its runs, work that a kill lost included. Raises StorageFailed when the plan is damaged.
    """
    plan = at.read_plan_summary() or {}
    return compared(plan, read_hint(at.estimate), read(at.series), is_copied=at.reused.exists())


def compared(
    plan: Mapping[str, Any], estimate: Mapping[str, Any], series: Series, *, is_copied: bool
) -> tuple[Compared, ...]:
    """`plan` is the summary of a plan, `estimate` what `batchrun plan` foretold by a measured profile, if it did.

    Both are of all rows, so nothing is foretold where some are copied from an earlier job (`is_copied`); and of one
    engine, so where several ran it only the tokens of prompts and outputs are foretold.
    """
    total = series.total
    if total is None or not plan:
        return ()
    shares = any(run.facts.get("shares_prefixes") for run in series.runs)
    counters = total.counters
    prompts = plan["unique_prompt_tokens"] if shares else plan["prompt_tokens"]
    # Each of several computes what it shares, in steps and a pool of its own.
    has_several = any(run.facts.get("num_workers", 1) > 1 for run in series.runs)
    peak_kv = None if has_several else plan["peak_kv_bytes"]
    if is_copied:
        estimate = {}
    elif has_several:
        estimate = {"output_tokens": estimate.get("output_tokens")}
    return (
        Compared("prompt tokens computed", "tokens", None if is_copied else prompts, counters.computed_prompt_tokens),
        Compared("output tokens", "tokens", estimate.get("output_tokens"), counters.output_tokens),
        Compared("tokens computed", "tokens", estimate.get("computed_tokens"), counters.computed_tokens),
        Compared("steps", "steps", estimate.get("steps"), counters.steps),
        Compared(
            "peak KV" if estimate else "peak KV, at most",
            "bytes",
            estimate.get("peak_kv_bytes", peak_kv),
            series.peak_kv_bytes,
        ),
        Compared("time in the engine", "seconds", estimate.get("run_s"), total.seconds),
    )
