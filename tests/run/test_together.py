"""Samples, log-probabilities, forms and tasks at once: what they give together, and what is refused by name."""

import json

import pytest
from pydantic import ValidationError

from batchrun.api import generate
from batchrun.engine.echo import EchoRunner
from batchrun.errors import BatchrunError, DataError, StoppedEarly
from batchrun.job import Job
from batchrun.retry import retry
from batchrun.stop import StopRequest
from batchrun.store.export import export
from batchrun.store.verify import verify
from tests.run.conftest import ignore
from tests.run.test_reuse import StoppedSoon
from tests.run.test_samples import all_of, numbers, sampled_echo

FORM = {"regex": "[ab]{2,9}c", "max_tokens": 12}
SAMPLES = {"n": 3, "temperature": 1}


@pytest.fixture
def sampling(monkeypatch):
    """Echo knows no randomness: this gives it some, of what a real model's is made of."""
    monkeypatch.setattr(EchoRunner, "_next", sampled_echo)


def test_every_sample_has_the_form_and_its_log_probabilities(echo_job, sampling, tmp_path):
    job, plain = echo_job(30, tmp_path / "a"), echo_job(30, tmp_path / "b")
    job.submit(**SAMPLES, **FORM, logprobs=1)
    plain.submit(**SAMPLES, **FORM)
    rows = job.rows()
    assert numbers(rows) == all_of(30, 3)
    assert len({row["text"] for row in rows}) > 3
    assert all({*row["text"][:-1]} <= {*"ab"} and row["text"][-1] == "c" for row in rows)
    assert [len(row["logprobs"]) for row in rows] == [row["completion_tokens"] for row in rows]
    assert [row["text"] for row in plain.rows()] == [row["text"] for row in rows]
    assert verify(job.out, num_samples=3).problems == ()


def test_samples_of_a_schema_in_the_order_of_the_run_have_their_values(echo_job, sampling):
    job = echo_job(20)
    job.submit(**SAMPLES, json_schema={"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2},
               logprobs=0, order="run")  # fmt: skip
    rows = job.rows()
    assert sorted(numbers(rows)) == all_of(20, 3)
    assert [row["parsed"] for row in rows] == [json.loads(row["text"]) for row in rows]
    assert verify(job.out, num_samples=3).problems == ()


def test_a_stopped_job_of_samples_with_a_form_goes_on(echo_job, sampling, tmp_path):
    job, straight = echo_job(200, tmp_path / "a"), echo_job(200, tmp_path / "b")
    straight.submit(max_num_seqs=8, **SAMPLES, **FORM)
    with pytest.raises(StoppedEarly):
        job.submit(StoppedSoon(), drain_timeout=0, max_num_seqs=8, **SAMPLES, **FORM)
    job.submit(max_num_seqs=8, **SAMPLES, **FORM)
    assert job.result() == straight.result()


def test_cut_samples_run_again_and_answers_are_copied(echo_job, sampling, tmp_path):
    """A row that is named in a message is one of the input."""
    job, later = echo_job(30, tmp_path / "a"), echo_job(30, tmp_path / "b")
    cut = job.submit(**SAMPLES, **FORM | {"max_tokens": 4}, logprobs=1)
    failed = [row for row in job.rows() if row["error"]]
    assert cut.errors == {"schema_violation": len(failed)}
    assert 0 < len(failed) < 90
    assert all(row["error"]["message"].startswith(f"row {row['row_idx']}: cut at 4 tokens") for row in failed)
    assert {row["logprobs"] for row in failed} == {None}
    assert retry(job.out, None, {"max_tokens": 12}, ignore, StopRequest()).retried == len(failed)
    rows = job.rows()
    assert numbers(rows) == all_of(30, 3)
    assert not any(row["error"] for row in rows)
    outcome = later.submit(**SAMPLES, **FORM | {"max_tokens": 4}, logprobs=1, reuse=str(job.out))
    assert outcome.reused == 90 - len(failed)
    export(job.out, "jsonl", tmp_path / "rows.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [line["text"] for line in lines] == [row["text"] for row in rows]


def test_a_row_that_repeats_itself_before_its_form_is_complete_is_an_error(echo_job):
    job = echo_job(5)
    job.submit(regex="a{20}", repetition_min_count=4, max_tokens=30)
    assert {row["finish_reason"] for row in job.rows()} == {"repetition"}
    assert "ended since it repeats itself before the text was complete by regex" in job.rows()[0]["error"]["message"]
    job.submit(regex="a{4}", repetition_min_count=4, max_tokens=30, overwrite=True)
    assert {(row["finish_reason"], row["text"]) for row in job.rows()} == {("stop", "aaaa")}


def test_reasoning_and_a_form_exclude_each_other(echo_job):
    job = echo_job(5)
    with pytest.raises(BatchrunError, match="--reasoning-end cannot go with --regex"):
        job.submit(regex="a+", reasoning_end="</think>")
    job.submit(reasoning_end="</think>", max_tokens=4)
    with pytest.raises(DataError, match="--reasoning-end has some before it"):
        retry(job.out, "row_idx < 2", {"regex": "a+"}, ignore, StopRequest())


def options_of(group):
    extras = {name: field.json_schema_extra for name, field in Job.model_fields.items()}
    return [name for name, extra in extras.items() if isinstance(extra, dict) and extra["group"] == group]


@pytest.mark.parametrize("task", [{"task": "score", "target_col": "id"}, {"task": "choose", "choice": ("a", "b")},
                                  {"task": "embed"}])  # fmt: skip
@pytest.mark.parametrize("name", options_of("Sampling"))
def test_what_is_not_generated_has_no_sampling_options(task, name):
    values = {"logit_bias": {3: 1.0}, "json_schema": "{}", "guided_choice": ("a",), "ignore_eos": True, "top_p": 0.5,
              "min_p": 0.5, "stop": ("a",), "bad_words": ("a",), "stop_token_ids": (3,), "regex": "a",
              "grammar": 'start: "a"', "early_stopping": True, "reasoning_start": "a",
              "reasoning_end": "a"}  # fmt: skip
    with pytest.raises(ValidationError, match=f"--{name.replace('_', '-')} is for --task generate, not {task['task']}"):
        Job(inputs=("in.parquet",), output="out", **task, **{name: values.get(name, 2)})


def test_a_frame_with_samples_of_a_form():
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({"prompt": ["a", "b"]}, index=[5, 7])
    found = generate(frame, model="echo", n=2, temperature=1, guided_choice=["yes", "no"], logprobs=0)
    assert found.index.tolist() == [5, 5, 7, 7]
    assert {*found["text"]} <= {"yes", "no"}
