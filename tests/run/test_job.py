"""A job from input to result, through every stage, and what a person sees of it."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun import lifecycle, planning
from batchrun.engine.echo import EchoRunner
from batchrun.engine.step import NO_TOKEN
from batchrun.errors import DataError, EngineFailed, JobMismatch, OutputRefused, StoppedEarly
from batchrun.observe.events import Message
from batchrun.plan.plan import load_plan
from batchrun.retry import retry
from batchrun.stop import AT_ONCE, StopRequest
from batchrun.store.status import status
from batchrun.store.store import Store
from batchrun.store.verify import verify
from tests.run.conftest import EchoJob, echo_text, ignore


def test_every_row_is_answered_once_in_input_order_as_the_model_alone_would(echo_job):
    job = echo_job(300)
    outcome = job.submit(max_tokens=40)
    rows = job.rows()
    assert [row["row_idx"] for row in rows] == list(range(300))
    assert [row["id"] for row in rows] == list(range(0, 3000, 10))
    assert [row["text"] for row in rows] == [echo_text(prompt, 40) for prompt in job.prompts]
    assert {row["finish_reason"] for row in rows} == {"stop", "length"}
    assert all(row["error"] is None for row in rows)
    assert (outcome.rows, outcome.num_failed, outcome.already_complete) == (300, 0, False)
    assert outcome.duplicates == 300 - len(set(job.prompts))


def test_verify_knows_a_column_of_lists_that_came_from_json(tmp_path, echo_job):
    job = echo_job(1)
    source = tmp_path / "rows.jsonl"
    source.write_text('{"prompt": "What?", "tags": ["a", "b"], "said": [{"by": "x", "marks": [1, 2]}]}\n')
    job.submit(inputs=(str(source),))
    assert [row["tags"] for row in job.rows()] == [["a", "b"]]
    assert verify(job.out).problems == ()


def test_only_what_no_other_row_shares_is_computed(echo_job):
    job = echo_job(300)
    plan = planning.plan(job.job(), ignore, StopRequest())
    outcome = job.submit()
    assert outcome.computed_tokens == plan.summary.unique_prompt_tokens
    assert outcome.cached_tokens == plan.summary.saved_tokens
    assert outcome.prompt_tokens == plan.summary.prompt_tokens


def test_the_same_call_again_changes_nothing(echo_job):
    job = echo_job(50)
    job.submit()
    before = job.result()
    again = job.submit()
    assert again.already_complete
    assert again.rows == 50
    assert job.result() == before


def test_stop_strings_cut_the_text_and_are_named(echo_job):
    job = echo_job(200)
    job.submit(max_tokens=60, stop=("ab", "q"))
    for row, prompt in zip(job.rows(), job.prompts, strict=True):
        whole = echo_text(prompt, 60)
        stops = [(whole.index(stop), stop) for stop in ("ab", "q") if stop in whole]
        if stops:
            at, stop = min(stops)
            assert (row["text"], row["finish_reason"], row["stop_reason"]) == (whole[:at], "stop", stop)
        else:
            assert row["text"] == whole


def test_a_small_pool_changes_how_it_runs_and_not_what_comes_out(echo_job, tmp_path):
    """Room for little more than the longest row: sequences are preempted and come back."""
    roomy, tight = echo_job(120, tmp_path / "roomy"), echo_job(120, tmp_path / "tight")
    roomy.submit(max_tokens=100)
    for preemption in ("recompute", "swap"):
        outcome = tight.submit(max_tokens=100, kv_cache_memory=8 * 16 * 14, preemption=preemption, overwrite=True)
        assert outcome.preemptions > 0
        assert (outcome.swapped_bytes > 0) == (preemption == "swap")
        assert tight.result() == roomy.result()


def test_sampling_depends_on_neither_batch_nor_policy(echo_job, tmp_path):
    one, other = echo_job(60, tmp_path / "one"), echo_job(60, tmp_path / "other")
    one.submit(max_num_seqs=1)
    other.submit(max_num_seqs=50, schedule="static", max_num_batched_tokens=7)
    assert one.result() == other.result()


def test_a_row_that_can_never_fit_is_refused_with_the_remedy(echo_job):
    job = echo_job(10)
    with pytest.raises(DataError, match=r"longest row needs KV for 579 tokens.* raise --kv-cache-memory"):
        job.submit(kv_cache_memory=8 * 16 * 3, max_tokens=500)


def test_another_job_on_the_same_output_is_refused_and_named(echo_job):
    job = echo_job(20)
    job.submit(max_tokens=5)
    before = job.result()
    with pytest.raises(JobMismatch, match="max_tokens"):
        job.submit(max_tokens=6)
    assert job.result() == before
    job.submit(max_tokens=6, overwrite=True)
    assert job.result() != before


def test_a_result_column_that_the_input_has_is_refused_unless_prefixed(echo_job):
    job = echo_job(20)
    job.submit()
    again = type(job)(job.folder / "again", job.prompts)
    again.folder.mkdir()
    (job.out / "part-00000.parquet").rename(again.source)
    with pytest.raises(DataError, match="--output-prefix"):
        again.submit()
    again.submit(output_prefix="new_")
    assert [row["new_text"] for row in again.rows()] == [row["text"] for row in again.rows()]


def test_an_output_that_is_somebody_elses_is_left_alone(echo_job):
    job = echo_job(5)
    job.out.mkdir()
    (job.out / "precious.txt").write_text("mine")
    with pytest.raises(OutputRefused, match="is not a result of batchrun"):
        job.submit()
    assert (job.out / "precious.txt").read_text() == "mine"


def test_a_stop_saves_finished_rows_and_unfinished_tokens(echo_job):
    job = echo_job(400)

    class After(StopRequest):
        """Raised in the middle of the run, by the number of times it is asked."""

        @property
        def level(self):
            self.asked += 1
            return AT_ONCE if self.asked > 60 else 0

        @level.setter
        def level(self, value):
            self.asked = 0

    stop = After()
    with pytest.raises(StoppedEarly, match=r"rows are committed, .*; the same command goes on from here") as stopped:
        job.submit(stop, max_tokens=40, max_num_seqs=8)
    store = Store.open(job.out)
    done = {row for unit in load_plan(store.at.plan).units for row in store.done(unit.index).tolist()}
    unfinished = store.load_partial().keys() - done
    assert 0 < len(unfinished) <= 8
    assert f"{len(done)} of 400 rows are committed, the tokens of {len(unfinished)} unfinished row" in str(
        stopped.value
    )
    assert not job.out.exists()
    outcome = job.submit(max_tokens=40)
    assert outcome.prompt_tokens > 0
    assert [row["text"] for row in job.rows()] == [echo_text(prompt, 40) for prompt in job.prompts]
    whole = sum(len(row["text"]) for row in job.rows())
    assert outcome.output_tokens < whole


def test_latencies_add_up_over_the_processes_of_a_job(echo_job):
    """Every row has one first token, whichever process it got it from; the report and `status` say the same."""
    job = echo_job(200)

    class After(StopRequest):
        """Raised in the middle of the run, by the number of times it is asked."""

        num_asked = 0

        @property
        def level(self):
            self.num_asked += 1
            return AT_ONCE if self.num_asked > 60 else 0

        @level.setter
        def level(self, value):
            pass

    with pytest.raises(StoppedEarly):
        job.submit(After(), max_num_seqs=8)
    num_before = status(job.out).progress["latencies"]["time_to_first_token_s"]["count"]
    outcome = job.submit(max_num_seqs=8)
    latencies = outcome.latencies
    assert 0 < num_before < latencies.first_token.count == len(set(job.prompts))
    assert latencies.queue.count >= latencies.first_token.count
    assert status(job.out).progress["latencies"] == latencies.to_dict()
    assert outcome.as_dict()["latencies"] == latencies.summary()
    assert job.submit(max_num_seqs=8).latencies == latencies


def test_an_engine_that_fails_loses_no_finished_row(echo_job, monkeypatch):
    """And the tokens of the unfinished rows are kept: the next run needs fewer steps than the first would have."""
    job, execute, steps = echo_job(200), EchoRunner.launch, []

    def fail_at_last(self, batch):
        steps.append(batch)
        if len(steps) == 100:
            raise EngineFailed("the device is gone")
        return execute(self, batch)

    monkeypatch.setattr(EchoRunner, "launch", fail_at_last)
    with pytest.raises(EngineFailed, match="the device is gone"):
        job.submit(max_num_seqs=8)
    outcome = job.submit(max_num_seqs=8)
    assert [row["text"] for row in job.rows()] == [echo_text(prompt, 256) for prompt in job.prompts]
    assert outcome.prompt_tokens < sum(len(prompt) + 1 for prompt in set(job.prompts))
    assert outcome.output_tokens < sum(row["completion_tokens"] for row in job.rows())


def test_a_row_without_finite_logits_is_a_row_with_an_error(echo_job, monkeypatch):
    """And so are its duplicates; every other row is answered."""
    job, execute = echo_job(60), EchoRunner.launch

    def poison(self, batch):
        ended = execute(self, batch)
        for place, item in enumerate(batch.sampled):
            if item.sequence.request.row_idx == bad:
                ended.sampled.tokens[place] = NO_TOKEN
        return ended

    bad = min(row for row, prompt in enumerate(job.prompts) if job.prompts.count(prompt) > 1)
    monkeypatch.setattr(EchoRunner, "launch", poison)
    assert job.submit().errors == {"engine_error": job.prompts.count(job.prompts[bad])}
    for row, prompt in zip(job.rows(), job.prompts, strict=True):
        if prompt == job.prompts[bad]:
            assert (row["text"], row["finish_reason"], row["error"]["type"]) == (None, "error", "engine_error")
        else:
            assert row["text"] == echo_text(prompt, 256)


def test_json_is_the_only_thing_on_stdout(echo_job):
    job = echo_job(20)
    done = job.call("submit", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"] == 20
    assert "\r" not in done.stderr


def diverse_job(make_job, folder):
    """Every row begins with a character of its own; the last three with the same one, which is too little to matter."""
    job = make_job(60, folder)
    rng = np.random.default_rng(63)
    prompts = [
        chr(ord("0") + min(row, 57)) + rng.integers(97, 123, rng.integers(200, 300), dtype=np.uint8).tobytes().decode()
        for row in range(60)
    ]
    pq.write_table(pa.table({"prompt": prompts}), job.source)
    return EchoJob(job.folder, prompts)


def test_rows_with_too_little_in_common_share_nothing_and_the_log_says_why(echo_job, tmp_path):
    job = diverse_job(echo_job, tmp_path)
    summary = planning.plan(job.job(), ignore, StopRequest()).summary
    events = []
    outcome = lifecycle.submit(job.job(), events.append, StopRequest())
    assert 0 < summary.saved_tokens < 0.005 * summary.prompt_tokens
    said = [event.text for event in events if isinstance(event, Message) and "prefix" in event.text]
    assert said == [
        f"prefix caching is off: only {summary.saved_tokens} of {summary.prompt_tokens:,} prompt tokens are shared, "
        "less than 0.5%; --prefix-caching on shares them all the same"
    ]
    assert (outcome.shares_prefixes, outcome.cached_tokens) == (False, 0)
    assert outcome.computed_tokens == summary.prompt_tokens


@pytest.mark.parametrize(("is_diverse", "num_blocks"), [(True, 60), (False, 14)])
def test_text_does_not_depend_on_prefix_caching(echo_job, tmp_path, is_diverse, num_blocks):
    """In a pool that makes rows leave and come back by recomputation; `auto` recomputes no more than `on`."""
    job = diverse_job(echo_job, tmp_path) if is_diverse else echo_job(120)
    recomputed, preemptions = {}, 0
    for mode in ("auto", "on", "off"):
        outcome = job.submit(
            max_tokens=100, kv_cache_memory=8 * 16 * num_blocks, prefix_caching=mode, preemption="recompute",
            overwrite=True,
        )  # fmt: skip
        recomputed[mode] = outcome.recomputed_tokens
        preemptions += outcome.preemptions
        assert [row["text"] for row in job.rows()] == [echo_text(prompt, 100) for prompt in job.prompts]
        assert outcome.shares_prefixes == (mode == "on" or (mode == "auto" and not is_diverse))
    assert preemptions > 0
    assert recomputed["auto"] <= recomputed["on"]


def test_a_partitioned_result_resumes_is_retried_and_refuses_another_shape(echo_job):
    job = echo_job(40)
    table = pq.read_table(job.source).append_column("lang", pa.array(["en", "de"] * 20))
    pq.write_table(table, job.source)
    with pytest.raises(DataError, match=r"--partition-by: the input has no column 'langs'; did you mean 'lang'\?"):
        job.submit(partition_by="langs")
    job.submit(partition_by="lang", max_tokens=20)
    assert sorted(path.name for path in job.out.iterdir()) == ["lang=de", "lang=en"]
    assert job.submit(partition_by="lang", max_tokens=20).already_complete
    with pytest.raises(JobMismatch, match="partition_by"):
        job.submit(max_tokens=20)
    assert retry(job.out, "lang = 'de'", {"max_tokens": 5}, ignore, StopRequest()).retried == 20
    assert verify(job.out).is_ok
    found = {
        row["row_idx"]: row["text"] for path in job.out.rglob("*.parquet") for row in pq.read_table(path).to_pylist()
    }
    assert found == {row: echo_text(prompt, 5 if row % 2 else 20) for row, prompt in enumerate(job.prompts)}


def test_an_input_without_rows_gives_a_complete_job_without_rows(echo_job):
    job = echo_job(3)
    pq.write_table(pq.read_table(job.source).slice(0, 0), job.source)
    outcome = job.submit()
    assert (outcome.rows, outcome.already_complete) == (0, False)
    assert job.rows() == []
    assert pq.read_table(job.out).schema.names[:4] == ["id", "prompt", "row_idx", "text"]
    assert job.submit().already_complete
