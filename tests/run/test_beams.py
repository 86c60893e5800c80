"""Jobs whose rows are searched with beams, on the model without weights: what a search without blocks finds."""

import json
import signal
import time
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun import planning
from batchrun import retry as retrying
from batchrun.cli_report import plan_text
from batchrun.engine.lengths import OutputLengths
from batchrun.engine.request import BeamSearch, SamplingParams
from batchrun.errors import AnswersDiffer, JobMismatch, UsageError
from batchrun.plan.plan import load_plan
from batchrun.plan.sharing import decide
from batchrun.stop import StopRequest
from batchrun.store.layout import Layout
from batchrun.tokenizer import EchoTokenizer
from tests.engine.test_beams import searched
from tests.run.conftest import EchoJob, ignore

BEAMS = {"num_beams": 3, "max_tokens": 20}


def found(prompt: str, num_beams: int = 3, max_tokens: int = 20, **search: Any) -> str:
    """What the search finds on the model `echo`, without an engine."""
    tokenizer = EchoTokenizer()
    ids = tokenizer.encode([prompt], add_special_tokens=True)[0].tolist()
    text = searched(ids, BeamSearch(num_beams, 2 * num_beams, **search), SamplingParams(max_tokens=max_tokens))
    return tokenizer.decode(text)


def texts(job: EchoJob) -> list[object]:
    return [row["text"] for row in job.rows()]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="as-it-is"),
        pytest.param({"length_penalty": 0.0, "early_stopping": True}, id="early"),
        pytest.param({"length_penalty": 2.0, "early_stopping": "never"}, id="never"),
        pytest.param({"prefix_caching": "off"}, id="nothing-shared"),
        pytest.param({"deterministic": True}, id="deterministic"),
        pytest.param({"max_num_seqs": 3, "max_num_batched_tokens": 2}, id="one-row-at-a-time"),
        pytest.param({"schedule": "static"}, id="static"),
        pytest.param({"order": "run"}, id="unsorted"),
    ],
)
def test_every_row_has_the_text_that_the_search_finds(echo_job, options: dict[str, Any]) -> None:
    """Copies of a row, too, which is searched once."""
    job = echo_job(40)
    job.submit(**BEAMS, **options)
    search = {name: options[name] for name in ("length_penalty", "early_stopping") if name in options}
    if "early_stopping" in search:
        search["early_stopping"] = str(search["early_stopping"]).lower()
    rows = sorted(job.rows(), key=lambda row: row["row_idx"])
    assert [row["text"] for row in rows] == [found(prompt, **search) for prompt in job.prompts]
    assert all(row["finish_reason"] == "stop" for row in rows if row["completion_tokens"] < 20)
    plan = load_plan(Layout(job.out).plan)
    assert plan is not None
    assert plan.summary.num_duplicates == 5


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_rows_that_had_to_leave_find_the_same(echo_job, preemption: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They enter as if they were to end at once; whatever is asked for, nothing of a beam is swapped."""
    monkeypatch.setattr(OutputLengths, "expected", lambda self, sampling, output_len: output_len + 1)
    job = echo_job(60)
    room = {"block_size": 4, "kv_cache_memory": 240 * 4 * 8, "max_num_seqs": 64, "preemption": preemption}
    outcome = job.submit(num_beams=4, max_tokens=90, length_penalty=1.3, **room)
    assert outcome.preemptions > 0
    assert texts(job) == [found(prompt, 4, 90, length_penalty=1.3) for prompt in job.prompts]
    metrics = (job.folder / "out.batchrun" / "metrics.prom").read_text()
    assert "batchrun_swapped_bytes_total 0" in metrics


def test_a_row_whose_beams_do_not_fit_the_pool_fails_by_itself(echo_job) -> None:
    job = echo_job(3)
    long = "x" * 700
    pq.write_table(pa.table({"id": [0, 1], "prompt": ["short", long]}), job.source)
    job.submit(num_beams=3, max_tokens=100, block_size=4, kv_cache_memory=250 * 4 * 8)
    short, failed = job.rows()
    assert short["text"] == found("short", 3, 100)
    assert failed["error"] == {
        "type": "overlong_prompt",
        "message": "row 1: its 3 beams may need KV for 1,012 tokens, but the pool holds 1,000; raise "
        "--kv-cache-memory, or lower --max-tokens or --num-beams",
    }


def test_a_plan_counts_the_blocks_of_all_beams_and_foretells_no_time(echo_job) -> None:
    job = echo_job(1)
    plan = planning.plan(job.job(**BEAMS, block_size=4), ignore, StopRequest())
    summary = plan.summary
    whole, shared = -(-summary.longest_len // 4), summary.longest_prompt // 4
    assert summary.peak_kv_bytes == 4 * summary.kv_bytes_per_token * (shared + 3 * (whole - shared))
    assert planning.estimate(job.job(**BEAMS), plan) is None
    assert "batchrun tune" not in plan_text(plan, None, decide("on", summary))


def test_beams_of_an_unfinished_row_start_again(echo_job) -> None:
    """Killed and stopped while rows are searched: no token of a beam is saved, and the result is the whole one's."""
    job = echo_job(400)
    command = ("submit", "--num-beams", "4", "--max-tokens", "40", "--max-num-seqs", "12", "--checkpoint-every", "0.1s")
    folder = job.folder / "out.batchrun"
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
        process = job.start(*command, "--drain-timeout", "0s")
        before = len(list(folder.glob("parts/*.parquet")))
        while process.poll() is None and len(list(folder.glob("parts/*.parquet"))) <= before:
            time.sleep(0.02)
        process.send_signal(number)
        process.communicate()
        assert process.returncode in (-number, 75), process.returncode
        assert not list(folder.glob("partial*"))
    assert job.call(*command).returncode == 0
    assert texts(job) == [found(prompt, 4, 40) for prompt in job.prompts]


REFUSED = {
    "temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.5, "presence_penalty": 1.0,
    "frequency_penalty": 1.0, "min_tokens": 3, "stop": ["x"], "logit_bias": {5: 1}, "bad_words": ["x"],
    "repetition_min_count": 3, "json_schema": "{}", "regex": "a+", "guided_choice": ["a", "b"], "grammar": 'start: "a"',
    "n": 2, "logprobs": 1, "reasoning_end": "</think>",
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_search_cannot_heed_is_refused_by_name(echo_job, name: str) -> None:
    with pytest.raises(UsageError, match=f"--{name.replace('_', '-')} cannot go with --num-beams"):
        echo_job(1).job(num_beams=2, **{name: REFUSED[name]})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length_penalty": 0.5}, "--length-penalty is for --num-beams above 1"),
        ({"early_stopping": "never"}, "--early-stopping is for --num-beams above 1"),
        ({"num_beams": 4, "max_num_seqs": 3}, "--max-num-seqs 3 has no room for 4 beams"),
        ({"num_beams": 2, "task": "embed"}, "--num-beams is for --task generate, not embed"),
        ({"num_beams": 2, "task": "score", "target_col": "id"}, "--num-beams is for --task generate, not score"),
        ({"num_beams": 2, "task": "choose", "choice": ["a", "b"]}, "--num-beams is for --task generate, not choose"),
        ({"num_beams": 65}, "num.beams"),
        ({"num_beams": 2, "early_stopping": "maybe"}, "early.stopping"),
    ],
)
def test_options_that_make_no_sense_together_are_refused(echo_job, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        echo_job(1).job(**options)


def test_parameters_of_a_row_s_own_are_those_that_a_search_heeds(echo_job) -> None:
    job = echo_job(3)
    prompts = ["one", "two", "three"]
    cells = [json.dumps(cell) for cell in ({"max_tokens": 5}, {"temperature": 0.7}, {"stop_token_ids": [100, 101]})]
    pq.write_table(pa.table({"prompt": prompts, "params": cells}), job.source)
    job.submit(**BEAMS, params_col="params")
    first, second, third = job.rows()
    assert first["text"] == found("one", 3, 5)
    assert second["error"]["type"] == "invalid_params"
    assert "temperature cannot go with num_beams" in second["error"]["message"]
    tokens = EchoTokenizer().encode(["three"], add_special_tokens=True)[0].tolist()
    sampling = SamplingParams(max_tokens=20, stop_token_ids=(100, 101))
    assert third["text"] == EchoTokenizer().decode(searched(tokens, BeamSearch(3, 12), sampling))


def test_retry_changes_only_what_a_search_heeds(echo_job) -> None:
    """Not the number of beams, which is the whole job's."""
    job = echo_job(12)
    job.submit(**BEAMS)
    with pytest.raises(UsageError, match="temperature cannot go with num_beams"):
        retrying.retry(job.out, "row_idx < 3", {"temperature": 0.5}, ignore, StopRequest())
    with pytest.raises(UsageError, match="num_beams"):
        retrying.retry(job.out, "row_idx < 3", {"num_beams": 5}, ignore, StopRequest())
    retrying.retry(job.out, "row_idx < 3", {"max_tokens": 6}, ignore, StopRequest())
    assert texts(job) == [found(prompt, 3, 6 if at < 3 else 20) for at, prompt in enumerate(job.prompts)]


@pytest.mark.parametrize(
    ("name", "value"), [("num_beams", 4), ("length_penalty", 2.0), ("early_stopping", "never"), ("num_beams", 1)]
)
def test_answers_of_another_search_are_no_answers(echo_job, name: str, value: Any) -> None:
    """Neither for the same output nor for a job that would copy them."""
    job = echo_job(5)
    job.submit(**BEAMS)
    with pytest.raises(JobMismatch, match=name):
        job.submit(**BEAMS | {name: value})
    other = EchoJob(job.folder / "other", job.prompts)
    other.folder.mkdir()
    other.source.write_bytes(job.source.read_bytes())
    with pytest.raises(AnswersDiffer, match=name):
        other.submit(**BEAMS | {name: value}, reuse=str(job.out))


def test_answers_of_the_same_search_are_copied(echo_job) -> None:
    job = echo_job(5)
    job.submit(**BEAMS)
    other = EchoJob(job.folder / "other", job.prompts)
    other.folder.mkdir()
    other.source.write_bytes(job.source.read_bytes())
    outcome = other.submit(**BEAMS, reuse=str(job.out))
    assert (outcome.reused, texts(other)) == (5, texts(job))
