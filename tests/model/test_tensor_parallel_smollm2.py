"""The real model divided among three ranks: when one dies the job ends, goes on, and answers as one rank does."""

from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun import lifecycle
from batchrun.errors import EngineFailed, ModelUnavailable
from batchrun.job import Job
from batchrun.observe.events import Committed, Event
from batchrun.stop import StopRequest
from tests.run.conftest import ignore

REVIEWS = Path(__file__).parents[2] / "examples" / "reviews.parquet"
QUESTION = "Here is a customer's review of a product. In one word, is the customer happy?\n\nReview: "


def make_job(folder: Path, name: str, num_ranks: int) -> Job:
    """Two rows at a time, committed as they end."""
    prompts = [QUESTION + text for text in pq.read_table(REVIEWS).column("review").to_pylist() if text][:5]
    pq.write_table(pa.table({"prompt": prompts}), folder / "in.parquet")
    given = {"chat": "off", "ignore_eos": True, "max_tokens": 7, "max_num_seqs": 2, "checkpoint_every": 0.01}
    here = {"inputs": (str(folder / "in.parquet"),), "output": str(folder / name), "tensor_parallel": num_ranks}
    return Job.load(given | here)


def test_a_job_whose_rank_is_killed_ends_with_a_message_and_goes_on_to_one_ranks_answers(tmp_path: Path) -> None:
    committed = 0

    def kill_the_last_rank(event: Event) -> None:
        nonlocal committed
        if isinstance(event, Committed):
            committed += event.rows
            for process in psutil.Process().children()[1:]:
                process.kill()

    job = make_job(tmp_path, "out", 3)
    with pytest.raises(EngineFailed, match="rank 2 of 3 has failed: killed by signal 9"):
        lifecycle.submit(job, kill_the_last_rank, StopRequest())
    assert psutil.Process().children() == []
    assert 0 < committed < 5
    lifecycle.submit(job, ignore, StopRequest())
    lifecycle.submit(make_job(tmp_path, "alone", 1), ignore, StopRequest())
    texts = [pq.read_table(tmp_path / name).column("text").to_pylist() for name in ("out", "alone")]
    assert texts[0] == texts[1]


def test_heads_that_two_ranks_cannot_share_are_refused_with_what_is_possible(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"9 heads of attention and 3 of keys and values, which 2 .* can be 3$"):
        lifecycle.submit(make_job(tmp_path, "out", 2), ignore, StopRequest())
