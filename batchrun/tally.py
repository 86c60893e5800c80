"""How far a job is: rows that are answered, over this run and those before it, and what that makes of its work."""

from dataclasses import dataclass, field, replace

from batchrun.engine.statistics import Statistics
from batchrun.errors import DataError
from batchrun.job import Job
from batchrun.latency import Latencies, RowTime
from batchrun.observe.events import RunProgress
from batchrun.plan.plan import PlanSummary
from batchrun.plan.sharing import decide
from batchrun.store.counts import Counts


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What an engine, or several, have to say of their work so far.

    A row is expected to have `mean_output_len` tokens of output. `busy_s` is the processor time of their processes, in
    seconds; `slowest` the rows that took longest, by the numbers that they have in the plan.
    """

    statistics: Statistics
    mean_output_len: float
    busy_s: float = 0.0
    latencies: Latencies = field(default_factory=Latencies)
    slowest: tuple[RowTime, ...] = ()


class Tally:
    """Counts rows of the input, of which `before` were answered before this run.

    `abort_after`: failed rows at which the job stops.
    """

    def __init__(self, job: Job, plan: PlanSummary, before: Counts, abort_after: int | None) -> None:
        self._plan = plan
        self._prompt_tokens = (
            plan.unique_prompt_tokens if decide(job.prefix_caching, plan).is_on else plan.prompt_tokens
        )
        self._num_before = before.rows
        self.num_done = before.rows
        self.num_failed = before.failed
        self._num_samples, self._num_beams = job.n, job.num_beams
        self._abort_after = abort_after

    def count(self, num_rows: int, num_failed: int) -> None:
        """So many more rows are answered, and so many of them failed."""
        self.num_done += num_rows
        self.num_failed += num_failed

    def check(self) -> None:
        """Raises DataError when too many rows have failed for the job to go on."""
        most = self._abort_after
        if most is not None and self.num_failed >= most and self.num_done < self._plan.num_rows:
            raise DataError(
                f"stopped after {self.num_failed:,} failed rows (--abort-after {most}); what was done is kept, and "
                "the same command with a higher --abort-after, or without it, goes on"
            )

    def progress(self, engine: EngineReport, elapsed_s: float) -> RunProgress:
        """The state of the run, `elapsed_s` after it began."""
        counters, plan = engine.statistics.counters, self._plan
        work = self._prompt_tokens + round(plan.num_unique * self._num_beams * engine.mean_output_len)
        if self.num_done == plan.num_rows:
            # The end is known: what was expected of outputs no longer matters.
            work = counters.computed_tokens - counters.recomputed_tokens
        done_before = work * self._num_before // max(plan.num_rows, 1)
        return RunProgress(
            rows_done=self.num_done,
            rows_total=plan.num_rows,
            rows_failed=self.num_failed,
            tokens_done=min(work, done_before + counters.computed_tokens - counters.recomputed_tokens),
            tokens_total=work,
            elapsed_s=elapsed_s,
            statistics=engine.statistics,
            latencies=engine.latencies,
            slowest=tuple(replace(row, row_idx=row.row_idx // self._num_samples) for row in engine.slowest),
            busy_s=engine.busy_s,
        )
