"""batchrun itself: a whole job, planned, run and published."""

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from batchrun import lifecycle
from batchrun.job import Job
from batchrun.stop import StopRequest
from batchrun_jobs.bench.clock import JobClock

if TYPE_CHECKING:
    from batchrun_jobs.bench_score.contract import GivenChoices, Scored


def run(given: "GivenChoices") -> "Scored":
    """The time is the engine's: rows are handed over when it is loaded, and back when they are committed.

    With the option `task=score` each choice is a row of its own.
    """
    options = dict(given["options"])
    task = options.pop("task", "choose")
    rows_file, column = Path(given["rows_file"]), {"choices_col": "choices"}
    if task == "score":
        rows_file, column = rows_file.with_name("pairs.parquet"), {"target_col": "target"}
        pairs = zip(given["prompts"], given["choices"], strict=True)
        rows = [(prompt, choice) for prompt, choices in pairs for choice in choices]
        pq.write_table(pa.table({"prompt": [one for one, _ in rows], "target": [one for _, one in rows]}), rows_file)
    job = Job.load(
        {
            "inputs": (str(rows_file),),
            "output": str(Path(given["scratch"]) / "out"),
            "task": task,
            "prompt_col": "prompt",
            "chat": "off",
            "device": "cpu",
            "model": given["model"] or "echo",
            **column,
            **options,
        }
    )
    clock = JobClock()
    outcome = lifecycle.submit(job, clock.observe, StopRequest())
    result = pa.concat_tables([pq.read_table(file) for file in sorted(Path(outcome.output).glob("*.parquet"))])
    name = "target_logprob" if task == "score" else "choice_logprobs"
    found = result.column(name).to_pylist()
    if task == "score":
        values = iter(found)
        found = [[next(values) for _ in choices] for choices in given["choices"]]
    return {
        "began": clock.began,
        "ended": clock.ended,
        "logprobs": found,
        "computed_tokens": outcome.computed_tokens,
    }
