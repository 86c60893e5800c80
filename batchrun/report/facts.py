"""All that is known of a job, gathered from its folder: what the report, its summary and the alerts are made of."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from batchrun.errors import StorageFailed
from batchrun.plan.prefixes import SharedPrefix, read_prefixes
from batchrun.report.alerts import Verdict, judge
from batchrun.report.compared import Compared, compared
from batchrun.report.results import Results, read_results
from batchrun.report.series import Series, read
from batchrun.store.layout import Layout, read_hint, read_json
from batchrun.store.status import Status, status


@dataclass(frozen=True, slots=True)
class Facts:
    """`job` are the stored options, `plan` is the plan's summary, empty before it is made."""

    status: Status
    job: Mapping[str, Any]
    plan: Mapping[str, Any]
    prefixes: tuple[SharedPrefix, ...]
    series: Series
    results: Results
    compared: tuple[Compared, ...]
    verdicts: tuple[Verdict, ...]

    @property
    def fired(self) -> tuple[Verdict, ...]:
        """The rules that ask for attention."""
        return tuple(verdict for verdict in self.verdicts if verdict.fires)


def gather(out: Path, name: str) -> Facts:
    """What there is of the job of OUT, which a user calls `name`.

    Raises:
        InputMissing: there is no such job.
        StorageFailed: the job, its plan or a part cannot be read.
    """
    at = Layout(out)
    now = status(out)
    stored = read_json(at.job)
    if stored is None:
        raise StorageFailed(f"{at.job} is gone; submit the job again")
    job = stored["job"]
    plan = at.read_plan_summary() or {}
    series = read(at.series)
    parts = [part.path for part in at.list_parts()]
    return Facts(
        status=replace(now, output=name),
        job=job,
        plan=plan,
        prefixes=tuple(read_prefixes(at.plan)),
        series=series,
        results=read_results(parts, job.get("output_prefix", ""), now.errors, job.get("n", 1)),
        compared=compared(plan, read_hint(at.estimate), series, is_copied=at.reused.exists()),
        verdicts=judge(series, None if at.reused.exists() else _best_of_all(now, plan, series)),
    )


def best_hit_rate(plan: Mapping[str, Any], num_given: int) -> float:
    """The share of the prompt tokens that need not be computed when every shared prefix is computed once.

    The engine was given `num_given`: of choices more than are planned, since a row's requests each have its prompt. A
    row that runs again after a stop has it twice too, but finds nothing of what the process before computed.
    """
    tokens = plan.get("prompt_tokens", 0)
    if plan.get("task") == "choose":
        tokens = max(tokens, num_given)
    return 1 - plan["unique_prompt_tokens"] / tokens if tokens else 0.0


def _best_of_all(now: Status, plan: Mapping[str, Any], series: Series) -> float | None:
    """None before all rows have run, or where a process that was killed has not said what it was given."""
    num_given = series.total.counters.prompt_tokens if series.total else 0
    num_planned = plan.get("prompt_tokens", 0)
    if plan.get("task") == "score":  # behind a target's last token nothing is asked for
        num_planned -= plan["num_unique"]
    if now.status != "completed" or num_given < num_planned:
        return None
    return best_hit_rate(plan, num_given)
