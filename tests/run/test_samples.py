"""Several samples of every row: each row of the input n times in the result, whatever the job goes through."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun import lifecycle
from batchrun.api import generate
from batchrun.engine.echo import EchoRunner
from batchrun.engine.step import NO_TOKEN
from batchrun.errors import DataError, StoppedEarly
from batchrun.plan.plan import load_plan
from batchrun.report.facts import gather
from batchrun.rerun import rerun
from batchrun.retry import retry
from batchrun.stop import StopRequest
from batchrun.store.export import export
from batchrun.store.status import status
from batchrun.store.verify import verify
from tests.run.conftest import EchoJob, ignore
from tests.run.test_reuse import StoppedSoon, day


def numbers(rows):
    return [(row["row_idx"], row["sample_idx"]) for row in rows]


def all_of(num_rows, n):
    return [(row, sample) for row in range(num_rows) for sample in range(n)]


def sampled_echo(self, item, allowed):
    """A model that answers each sample of a row in its own way; as the real ones do, by seed and row."""
    request = item.sequence.request
    letters = 3 + ord("a") + np.arange(26) if allowed is None else allowed
    return int(letters[(request.seed * 7 + request.input_row * 3 + item.end) % len(letters)])


@pytest.fixture
def sampling(monkeypatch):
    """Echo knows no randomness: this gives it some, of what a real model's is made of."""
    monkeypatch.setattr(EchoRunner, "_next", sampled_echo)


def test_every_row_is_answered_n_times_in_order(echo_job, sampling):
    job = echo_job(60)
    outcome = job.submit(n=3, temperature=1, max_tokens=12)
    rows = job.rows()
    assert numbers(rows) == all_of(60, 3)
    assert [row["id"] for row in rows] == [10 * (at // 3) for at in range(180)]
    assert outcome.rows == 180
    assert verify(job.out, num_samples=3).is_ok
    assert status(job.out).request_counts.total == 180
    assert len({row["text"] for row in rows[:3]}) == 3
    again = lifecycle.submit(job.job(n=3, temperature=1, max_tokens=12), ignore, StopRequest())
    assert again.already_complete
    assert again.rows == 180


def test_sample_s_is_what_one_sample_is_with_s_added_to_the_seed(echo_job, sampling):
    """As with vLLM."""
    job = echo_job(40)
    job.submit(n=4, temperature=1, seed=11, max_tokens=9)
    together = job.rows()
    for sample in range(4):
        job.submit(temperature=1, seed=11 + sample, max_tokens=9, overwrite=True)
        assert [row["text"] for row in job.rows()] == [row["text"] for row in together[sample::4]]


def test_equal_greedy_samples_are_computed_once(echo_job):
    job = echo_job(60)
    outcome = job.submit(n=3, max_tokens=12)
    assert outcome.duplicates == 180 - len(set(job.prompts))
    rows = job.rows()
    assert numbers(rows) == all_of(60, 3)
    assert [row["text"] for row in rows[::3]] == [row["text"] for row in rows[2::3]]


def test_a_row_s_prompt_is_computed_once_for_all_its_samples(echo_job):
    """But for its last token, whose logits each sample needs."""
    job = echo_job(20)
    num_prompts = len(set(job.prompts))
    one = job.submit(temperature=1, max_tokens=4)
    assert load_plan(job.out.parent / "out.batchrun" / "plan").summary.num_unique == 20
    several = job.submit(n=5, temperature=1, max_tokens=4, overwrite=True)
    assert num_prompts < 20
    assert several.computed_tokens == one.computed_tokens + 4 * 20


def test_a_stopped_job_goes_on_and_no_sample_is_lost_or_doubled(echo_job, sampling, tmp_path):
    job, straight = echo_job(200, tmp_path / "a"), echo_job(200, tmp_path / "b")
    options = {"n": 3, "temperature": 1, "max_tokens": 12, "max_num_seqs": 8}
    straight.submit(**options)
    with pytest.raises(StoppedEarly):
        job.submit(StoppedSoon(), drain_timeout=0, **options)
    counts = status(job.out).request_counts
    assert counts.total == 600
    assert 0 < counts.completed < 600
    job.submit(**options)
    assert job.result() == straight.result()


def test_failed_samples_run_again_and_the_others_stay(echo_job, sampling, monkeypatch):
    job, launch = echo_job(30), EchoRunner.launch

    def poison(self, batch):
        ended = launch(self, batch)
        for place, item in enumerate(batch.sampled):
            if item.sequence.request.row_idx in (31, 32, 50):
                ended.sampled.tokens[place] = NO_TOKEN
        return ended

    with monkeypatch.context() as patched:
        patched.setattr(EchoRunner, "launch", poison)
        assert job.submit(n=3, temperature=1, max_tokens=9).num_failed == 3
    before = job.rows()
    assert [at for at, row in enumerate(before) if row["error"]] == [31, 32, 50]
    assert {row.row_idx for row in gather(job.out, "out").results.errors} == {10, 16}
    assert retry(job.out, None, {}, ignore, StopRequest()).retried == 3
    after = job.rows()
    assert numbers(after) == all_of(30, 3)
    assert [row for at, row in enumerate(after) if at not in (31, 32, 50)] == [
        row for at, row in enumerate(before) if at not in (31, 32, 50)
    ]
    assert not any(row["error"] for row in after)
    job.submit(n=3, temperature=1, max_tokens=9, overwrite=True)
    assert [row["text"] for row in job.rows()] == [row["text"] for row in after]


def test_retry_takes_a_condition_on_the_sample(echo_job, sampling):
    job = echo_job(30)
    job.submit(n=3, temperature=1, max_tokens=9)
    before = job.rows()
    assert retry(job.out, "sample_idx = 1 AND row_idx < 10", {"max_tokens": 20}, ignore, StopRequest()).retried == 10
    after = job.rows()
    changed = [number for number, one, other in zip(numbers(after), before, after, strict=True) if one != other]
    assert changed == [(row, 1) for row in range(10)]
    assert verify(job.out, num_samples=3).is_ok


def test_a_row_that_cannot_be_run_fails_with_all_its_samples(tmp_path):
    table = pa.table({"prompt": ["one", "two", "three"], "params": [None, '{"top_q": 1}', None]})
    pq.write_table(table, tmp_path / "input.parquet")
    job = EchoJob(tmp_path, [])
    outcome = job.submit(n=2, max_tokens=4, params_col="params")
    rows = job.rows()
    assert numbers(rows) == all_of(3, 2)
    assert [row["error"] and row["error"]["type"] for row in rows] == [None] * 2 + ["invalid_params"] * 2 + [None] * 2
    assert (outcome.rows, outcome.errors) == (6, {"invalid_params": 2})
    assert {row.row_idx for row in gather(job.out, "out").results.errors} == {1}


def test_reuse_copies_every_sample(echo_job, sampling, tmp_path):
    old, new = echo_job(30, tmp_path / "old"), echo_job(40, tmp_path / "new")
    options = {"n": 3, "temperature": 1, "max_tokens": 9}
    old.submit(**options)
    outcome = new.submit(reuse=str(old.out), **options)
    rows = new.rows()
    assert numbers(rows) == all_of(40, 3)
    # Prompts of the first rows are the same, and so are their numbers, of which the randomness is made.
    assert outcome.reused >= 3 * 20
    new.submit(overwrite=True, **options)
    assert [row["text"] for row in new.rows()] == [row["text"] for row in rows]


def test_rerun_says_which_sample_differs(echo_job, sampling, monkeypatch):
    job = echo_job(30)
    job.submit(n=3, temperature=1, max_tokens=9)
    assert rerun(job.out, 1.0, ignore, StopRequest()).differences == ()

    def another_in_31(self, item, allowed):
        return 100 if item.sequence.request.row_idx == 31 else sampled_echo(self, item, allowed)

    monkeypatch.setattr(EchoRunner, "_next", another_in_31)
    found = rerun(job.out, 1.0, ignore, StopRequest())
    assert [(one.row_idx, one.sample_idx, one.sample) for one in found.differences] == [(10, 1, ", sample 1")]


def test_verify_misses_a_sample(echo_job):
    job = echo_job(30)
    job.submit(n=3, max_tokens=9)
    assert not verify(job.out).is_ok
    file = next(job.out.glob("*.parquet"))
    pq.write_table(pq.read_table(file).filter(pa.array([at != 31 for at in range(90)])), file)
    problems = verify(job.out, num_samples=3).problems
    assert any("row_idx 10, sample_idx 2 where 10, sample_idx 1 was due" in problem for problem in problems)


def test_samples_are_the_choices_of_a_batch_request(tmp_path, sampling):
    job = day(tmp_path / "job", ["one", "two"], custom_id=["x", "y"])
    job.submit(n=3, temperature=1, max_tokens=5)
    export(job.out, "openai-batch", tmp_path / "answered.jsonl")
    answered = [json.loads(line) for line in (tmp_path / "answered.jsonl").read_text().splitlines()]
    assert [line["custom_id"] for line in answered] == ["x", "y"]
    body = answered[0]["response"]["body"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert [choice["message"]["content"] for choice in body["choices"]] == [row["text"] for row in job.rows()[:3]]
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (job.rows()[0]["prompt_tokens"], 15)


def test_folders_by_value_hold_the_samples_in_order(echo_job, sampling, tmp_path):
    job = echo_job(20)
    job.submit(n=3, temperature=1, max_tokens=5, partition_by="id")
    assert verify(job.out, num_samples=3).is_ok
    export(job.out, "jsonl", tmp_path / "rows.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert numbers(rows) == all_of(20, 3)


def test_a_stopped_job_with_logprobs_has_them_all_in_the_end(echo_job):
    """An unfinished row's tokens are not saved without them."""
    job = echo_job(60)
    options = {"logprobs": 2, "max_tokens": 30, "max_num_seqs": 8}
    with pytest.raises(StoppedEarly):
        job.submit(StoppedSoon(), drain_timeout=0, **options)
    job.submit(**options)
    rows = job.rows()
    assert [len(row["logprobs"]) for row in rows] == [row["completion_tokens"] for row in rows]
    assert {row["logprob"] for row in rows} == {0.0}
    entry = rows[0]["logprobs"][0]
    top = [{"token_id": entry["token_id"], "logprob": 0.0}]
    assert entry == {"token_id": entry["token_id"], "logprob": 0.0, "rank": 1, "top_logprobs": top}
    assert list(rows[0])[-3:] == ["logprob", "logprobs", "error"]
    assert verify(job.out).problems == ()


def test_a_frame_comes_back_with_each_row_n_times():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"prompt": ["one", "two"]}, index=["a", "b"])
    answers = generate(frame, model="echo", n=2, max_tokens=4)
    assert list(answers.index) == ["a", "a", "b", "b"]
    assert list(answers["sample_idx"]) == [0, 1, 0, 1]


def test_an_input_column_of_that_name_is_refused(tmp_path):
    pq.write_table(pa.table({"prompt": ["x"], "sample_idx": [1]}), tmp_path / "input.parquet")
    job = EchoJob(tmp_path, [])
    job.submit(max_tokens=2)
    with pytest.raises(DataError, match="a column 'sample_idx' and so has the result"):
        job.submit(n=2, max_tokens=2, overwrite=True)
