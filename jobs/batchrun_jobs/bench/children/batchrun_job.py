"""batchrun itself: a whole job, planned, run and published, with the token ids kept that a job's result leaves out."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from batchrun import lifecycle
from batchrun.engine.request import Completion
from batchrun.job import Job
from batchrun.stop import StopRequest
from batchrun.tasks.generate import GenerateTask, PlannedRow
from batchrun_jobs.bench.clock import JobClock

if TYPE_CHECKING:
    from batchrun_jobs.bench.contract import Answered, Given

_Finished = Sequence[tuple[PlannedRow, tuple[Completion, ...]]]
_Fold = Callable[[GenerateTask, _Finished], pa.Table]


def run(given: "Given") -> "Answered":
    """The time is the engine's: rows are handed over when it is loaded, and back when they are committed."""
    job = Job.load(
        {
            "inputs": (given["rows_file"],),
            "output": str(Path(given["scratch"]) / "out"),
            "prompt_col": "prompt",
            "params_col": "params",
            "chat": "off",
            "ignore_eos": True,
            "device": "cpu",
            "model": given["model"] or "echo",
            **given["options"],
        }
    )
    answers = _Answers(given["prompt_ids"])
    # A job's result has no token ids. This process runs one job and ends.
    GenerateTask.fold = answers.kept(GenerateTask.fold)  # type: ignore[method-assign, assignment]
    clock = JobClock()
    outcome = lifecycle.submit(job, clock.observe, StopRequest())
    return {
        "began": clock.began,
        "ended": clock.ended,
        "token_ids": answers.token_ids,
        "computed_tokens": outcome.computed_tokens,
        "useful": outcome.occupancy,
        "latencies": outcome.latencies.summary(),
    }


class _Answers:
    """The token ids of the rows as they come; empty for a row that failed."""

    def __init__(self, prompt_ids: list[list[int]]) -> None:
        self._prompt_ids = prompt_ids
        self.token_ids: list[list[int]] = [[] for _ in prompt_ids]

    def kept(self, fold: _Fold) -> _Fold:
        """`fold`, which also keeps what goes through it."""

        def folded(task: GenerateTask, finished: _Finished) -> pa.Table:
            for row, (completion,) in finished:
                for row_idx in (row.row_idx, *row.duplicates):
                    assert row.token_ids.tolist() == self._prompt_ids[row_idx], f"row {row_idx} has other tokens"
                    self.token_ids[row_idx] = list(map(int, completion.token_ids))
            return fold(task, finished)

        return folded
