"""Rows of a complete job once more: new answers in the place of the old, all of them or none."""

import errno
import json
from pathlib import Path

import pyarrow as pa
import pytest

from batchrun.engine.echo import EchoRunner
from batchrun.engine.step import NO_TOKEN
from batchrun.errors import AnswersDiffer, InputMissing, JobMismatch, StoppedEarly, StorageFailed, UsageError
from batchrun.observe.events import Message
from batchrun.retry import retry
from batchrun.stop import StopRequest
from batchrun.store.layout import Layout
from batchrun.store.status import status
from batchrun.store.verify import verify
from tests.run.conftest import echo_text, ignore
from tests.run.test_kill import REST, kill_again_and_again
from tests.run.test_reuse import StoppedSoon, day


def again(job, where=None, stop=None, **changes):
    return retry(job.out, where, changes, ignore, stop or StopRequest())


def test_failed_rows_run_again_and_the_others_are_left_alone(echo_job, tmp_path, monkeypatch):
    job, undisturbed, launch = echo_job(60, tmp_path / "a"), echo_job(60, tmp_path / "b"), EchoRunner.launch
    undisturbed.submit()

    def poison(self, batch):
        ended = launch(self, batch)
        for place, item in enumerate(batch.sampled):
            if item.sequence.request.row_idx % 10 == 3:
                ended.sampled.tokens[place] = NO_TOKEN
        return ended

    with monkeypatch.context() as patched:
        patched.setattr(EchoRunner, "launch", poison)
        num_failed = job.submit().num_failed
    assert num_failed >= 6
    outcome = again(job)
    assert (outcome.retried, outcome.num_failed, outcome.rows) == (num_failed, 0, 60)
    assert outcome.prompt_tokens < 0.3 * sum(map(len, job.prompts))
    texts = [row["text"] for row in job.rows()]
    assert texts == [row["text"] for row in undisturbed.rows()]
    assert verify(job.out).is_ok
    assert (again(job).retried, again(job).already_complete) == (0, True)


def test_cut_answers_get_more_room_and_duplicates_may_part(echo_job):
    """Of rows with one prompt only some are selected: these get the new answer, the others keep theirs."""
    job = echo_job(120)
    job.submit(max_tokens=12)
    before = job.rows()
    outcome = again(job, "finish_reason = 'length' AND row_idx < 60", max_tokens="100")
    chosen = {row["row_idx"] for row in before if row["finish_reason"] == "length" and row["row_idx"] < 60}
    assert outcome.retried == len(chosen) > 0
    for old, new, prompt in zip(before, job.rows(), job.prompts, strict=True):
        if new["row_idx"] in chosen:
            assert new["text"] == echo_text(prompt, 100)
            assert new["finish_reason"] == "stop" or new["completion_tokens"] == 100
        else:
            assert new == old
    assert {job.prompts[row] for row in chosen} & {job.prompts[row] for row in range(120) if row not in chosen}
    report = verify(job.out)
    assert (report.is_ok, report.num_rows) == (True, 120)
    assert not status(job.out).errors
    # And once more, over rows that were retried and rows that were not.
    assert again(job, "row_idx BETWEEN 50 AND 70 -- a comment", max_tokens=5).retried == 21
    for row in job.rows():
        if 50 <= row["row_idx"] <= 70:
            assert row["text"] == echo_text(job.prompts[row["row_idx"]], 5)


def test_a_prompt_that_was_too_long_can_be_cut_in_a_retry(tmp_path):
    job = day(tmp_path / "job", ["short", "long " * 40])
    assert job.submit(max_model_len=100, max_tokens=20).errors == {"overlong_prompt": 1}
    assert again(job).errors == {"overlong_prompt": 1}
    outcome = again(job, on_overlong="truncate-left")
    assert (outcome.retried, outcome.num_failed, outcome.error_examples) == (1, 0, {})
    assert job.rows()[1]["text"]


def test_a_rows_own_parameters_give_way_and_the_rest_of_them_stay(tmp_path):
    job = day(tmp_path / "job", ["one", "two"], params=['{"max_tokens": 2, "stop": ["zz"]}', None])
    job.submit(params_col="params")
    again(job, "true", max_tokens=4)
    units = pa.concat_tables(pa.ipc.open_file(path).read_all() for path in Layout(job.out).plan.glob("*.arrow"))
    assert sorted(units.column("params").to_pylist()) == ['{"max_tokens":4,"stop":["zz"]}', '{"max_tokens":4}']


@pytest.mark.parametrize(
    ("where", "message"),
    [("nonsense = 1", r"--where nonsense = 1: .*nonsense"), ("text =", "--where text =: .*[Ss]yntax"),
     ("CAST(text AS INT) = 1", "--where .*Conversion")],
)  # fmt: skip
def test_a_condition_that_is_no_sql_is_refused_in_duckdbs_words(echo_job, where, message):
    job = echo_job(10)
    job.submit()
    before = job.result()
    with pytest.raises(UsageError, match=message):
        again(job, where)
    assert job.result() == before
    assert status(job.out).status == "completed"


def test_what_cannot_be_retried_is_said(echo_job, tmp_path):
    job = echo_job(100)
    with pytest.raises(InputMissing, match="no job at"):
        again(job)
    with pytest.raises(StoppedEarly):
        job.submit(StoppedSoon(), max_num_seqs=4)
    with pytest.raises(InputMissing, match=r"is not complete; batchrun resume .*/out completes it"):
        again(job)
    job.submit(max_num_seqs=4)
    with pytest.raises(UsageError, match="--max-tokens should be greater than or equal to 1"):
        again(job, max_tokens=0)
    with pytest.raises(UsageError, match="unknown option 'model'"):
        again(job, model="other")


def test_a_result_that_cannot_be_listed_is_a_failed_disk(echo_job, monkeypatch):
    job = echo_job(20)
    job.submit(max_tokens=5)

    listed = Path.rglob

    def refuse(path, pattern):
        if pattern == "*.parquet":
            raise OSError(errno.EIO, "Input/output error", str(path))
        return listed(path, pattern)

    with monkeypatch.context() as broken:
        broken.setattr(Path, "rglob", refuse)
        with pytest.raises(StorageFailed, match="Input/output error"):
            retry(job.out, "row_idx < 3", {"max_tokens": 9}, ignore, StopRequest())
    assert retry(job.out, "row_idx < 3", {"max_tokens": 9}, ignore, StopRequest()).retried == 3


def test_an_unfinished_retry_goes_on_by_the_same_command_only(echo_job):
    job = echo_job(300)
    job.submit(max_tokens=10)
    before = job.result()
    with pytest.raises(StoppedEarly):
        again(job, "row_idx >= 100", StoppedSoon(), max_tokens=60)
    assert job.result() == before
    assert status(job.out).status == "cancelled"
    with pytest.raises(
        AnswersDiffer, match=r"a retry of 200 rows of .* is unfinished \(differing: changes\); batchrun"
    ):
        again(job, "row_idx >= 100", max_tokens=61)
    outcome = again(job, "row_idx >= 100", max_tokens=60)
    assert outcome.retried == 200
    expected = [echo_text(prompt, 60 if row >= 100 else 10) for row, prompt in enumerate(job.prompts)]
    assert [row["text"] for row in job.rows()] == expected


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"min_tokens": 900}, "min_tokens 900 is more than max_tokens 60"),
     ({"repetition_min_count": 1}, "2 is the least"),
     ({"stop": [""]}, "empty text"),
     ({"logit_bias": {9999999: -5}}, "names the token 9,999,999"),
     ({"regex": "a+", "ignore_eos": True}, "ignore_eos cannot go with regex")],
)  # fmt: skip
def test_options_with_which_every_row_would_fail_cost_no_answer(echo_job, changes, said):
    job, events = echo_job(20), []
    job.submit(max_tokens=60)
    before = job.result()
    with pytest.raises(UsageError, match=said):
        retry(job.out, "true", changes, events.append, StopRequest())
    assert job.result() == before
    assert [event.text for event in events if isinstance(event, Message)] == []
    assert again(job).retried == 0


def test_another_job_does_not_take_the_place_of_one_whose_rows_are_all_taken_back(echo_job):
    job, at_once = echo_job(20), StopRequest()
    job.submit()
    at_once.request("SIGTERM")
    at_once.request("SIGTERM")
    with pytest.raises(StoppedEarly):
        again(job, "true", at_once, temperature=0.5)
    with pytest.raises(JobMismatch):
        job.submit(max_tokens=7)


def test_saved_tokens_of_the_first_run_do_not_get_into_a_retry(echo_job):
    """They are of other sampling; the row that they belong to went on to be answered and is taken back now."""
    job = echo_job(200)
    with pytest.raises(StoppedEarly):
        job.submit(StoppedSoon(), max_num_seqs=8, temperature=0.9)
    assert Layout(job.out).partial.exists()
    job.submit(temperature=0.9)
    again(job, "true", temperature=0.0)
    assert [row["text"] for row in job.rows()] == [echo_text(prompt, 256) for prompt in job.prompts]


def test_a_retry_killed_again_and_again_ends_like_one_that_never_was(echo_job, tmp_path):
    job, undisturbed = (echo_job(2500, tmp_path / name) for name in ("killed", "undisturbed"))
    assert job.call("submit", *REST, "--max-tokens", "6").returncode == 0
    assert undisturbed.call("submit", *REST, "--max-tokens", "6").returncode == 0
    arguments = ("--where", "finish_reason = 'length'", "--max-tokens", "60", "--progress", "none")
    assert undisturbed.call("retry", str(undisturbed.out), *arguments).returncode == 0
    old, new = job.result(), undisturbed.result()
    assert old != new

    def is_done() -> bool:
        assert not job.out.exists() or job.result() in (old, new)
        # Once more would be another retry, of the rows that are still cut.
        return job.out.exists() and job.result() == new

    kill_again_and_again(job, ("retry", str(job.out), *arguments), 5, Layout(job.out).overwriting.exists, is_done)
    done = job.call("resume", str(job.out))
    assert done.returncode == 0, done.stderr
    assert job.result() == new
    assert verify(job.out).is_ok


def test_the_command_says_when_no_row_matches_and_refuses_by_exit_code(echo_job):
    job = echo_job(10)
    assert job.call("submit").returncode == 0
    nothing = job.call("retry", str(job.out), "--json")
    assert (nothing.returncode, json.loads(nothing.stdout)["retried"]) == (0, 0)
    assert "no row matches; nothing was run" in nothing.stderr
    wrong = job.call("retry", str(job.out), "--where", "nope")
    assert (wrong.returncode, wrong.stdout, wrong.stderr.count("\n")) == (2, "", 1)
    assert 'Referenced column "nope"' in wrong.stderr
