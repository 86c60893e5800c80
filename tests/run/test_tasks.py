"""score, choose and embed as whole jobs on the model without weights: exact answers, errors as rows, resuming."""

import re

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchrun as br
from batchrun import planning
from batchrun.engine.echo import HIDDEN_SIZE, EchoRunner, entries, hidden, logprob
from batchrun.errors import DataError, EngineFailed, UsageError
from batchrun.retry import retry
from batchrun.stop import StopRequest
from batchrun.store.verify import verify
from batchrun.tokenizer import EchoTokenizer
from tests.run.conftest import EchoJob, ignore

CHOICES = ["yes", "yesterday", "no", "n"]
TARGETS = ["fine", "fine too", "", "no"]


def logprobs(prompt: str, text: str) -> list[float]:
    """What the model makes of each token of a text, with no engine at all. Bytes: what merges is not in question."""
    head, tail = prompt.rstrip(), prompt[len(prompt.rstrip()) :] + text
    ids = EchoTokenizer().encode([head + tail], add_special_tokens=True)[0]
    context, first = entries(ids, 0), len(ids) - len(tail.encode())
    return [logprob(context[:at], int(ids[at]))[0] for at in range(first, len(ids))]


def write(job: EchoJob) -> list[dict[str, object]]:
    """Adds targets and choices to the job's input; its rows."""
    table = pq.read_table(job.source)
    targets = [f"{TARGETS[at % 4]}{at % 9}" if at % 4 != 2 else None for at in range(len(table))]
    choices = [CHOICES[: 2 + at % 3] for at in range(len(table))]
    table = table.append_column("target", pa.array(targets, pa.string()))
    table = table.append_column("choices", pa.array(choices, pa.list_(pa.string())))
    pq.write_table(table, job.source)
    return table.to_pylist()


SMALL = {"max_num_batched_tokens": 37, "max_num_seqs": 5, "kv_cache_memory": 40 * 8 * 16}


def test_targets_are_scored(echo_job):
    job = echo_job(60)
    rows = write(job)
    outcome = job.submit(task="score", target_col="target", **SMALL)
    assert outcome.errors == {"empty_target": 15}
    for given, row in zip(rows, job.rows(), strict=True):
        if given["target"] is None:
            assert row["target_logprob"] is row["target_logprobs"] is row["target_is_greedy"] is None
            assert row["error"]["message"].startswith(f"row {row['row_idx']}: column 'target' is null")
            continue
        expected = logprobs(given["prompt"], given["target"])
        assert row["error"] is None
        assert (row["target_logprob"], row["target_tokens"]) == (sum(expected), len(expected))
        assert row["target_logprobs"] == expected
        assert row["prompt_tokens"] == 1 + len(given["prompt"])
    assert verify(job.out).is_ok


@pytest.mark.parametrize("own", [False, True])
def test_the_likeliest_choice_is_the_label(echo_job, own):
    job = echo_job(60)
    rows = write(job)
    outcome = job.submit(task="choose", **({"choices_col": "choices"} if own else {"choice": CHOICES}), **SMALL)
    assert outcome.preemptions or outcome.cached_tokens
    for given, row in zip(rows, job.rows(), strict=True):
        texts = given["choices"] if own else CHOICES
        expected = [sum(logprobs(given["prompt"], text)) for text in texts]
        assert row["choice_logprobs"] == expected
        assert row["label"] == texts[int(np.argmax(expected))]
        assert row["label_prob"] == max(row["choice_probs"])
        assert sum(row["choice_probs"]) == pytest.approx(1)
    assert verify(job.out).is_ok


def test_no_token_of_prompts_and_choices_is_computed_twice(echo_job):
    job = echo_job(40)
    rows = write(job)
    outcome = job.submit(task="choose", choice=CHOICES)
    tokenizer, nodes = EchoTokenizer(), set()
    for row in rows:
        for text in CHOICES:
            ids = tokenizer.encode([row["prompt"] + text], add_special_tokens=True)[0].tolist()[:-1]
            nodes |= {tuple(ids[:end]) for end in range(1, len(ids) + 1)}
    assert outcome.computed_tokens == len(nodes)


@pytest.mark.parametrize(("how", "length"), [("tokens", len), ("bytes", lambda text: len(text.encode()))])
def test_length_counts_when_it_is_asked_to(echo_job, how, length):
    job = echo_job(20)
    rows = write(job)
    job.submit(task="choose", choice=CHOICES, choice_normalise=how)
    for given, row in zip(rows, job.rows(), strict=True):
        raw = [sum(logprobs(given["prompt"], text)) for text in CHOICES]
        scores = np.array([one / length(text) for one, text in zip(raw, CHOICES, strict=True)])
        assert row["choice_logprobs"] == raw
        assert row["label"] == CHOICES[int(scores.argmax())]
        assert row["choice_probs"] == pytest.approx((np.exp(scores) / np.exp(scores).sum()).tolist())


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("prior", ["Answer:", "A prompt that is longer than any row's, but says nothing. Answer: ", ""])
def test_probabilities_may_be_relative_to_those_behind_another_prompt(echo_job, own, prior):
    job = echo_job(60)
    rows = write(job)
    given = {"choices_col": "choices"} if own else {"choice": CHOICES}
    job.submit(task="choose", choice_prior=prior, choice_normalise="tokens", **given, **SMALL)
    for given, row in zip(rows, job.rows(), strict=True):
        texts = given["choices"] if own else CHOICES
        assert row["choice_logprobs"] == [sum(logprobs(given["prompt"], text)) for text in texts]
        assert row["choice_prior_logprobs"] == [sum(logprobs(prior, text)) for text in texts]
        lifts = np.array(row["choice_logprobs"]) - np.array(row["choice_prior_logprobs"])
        scores = lifts / np.array(list(map(len, texts)))
        assert row["choice_probs"] == pytest.approx((np.exp(scores) / np.exp(scores).sum()).tolist())
        assert row["label"] == texts[int(scores.argmax())]
    assert verify(job.out).is_ok


def test_the_other_prompt_is_computed_once_but_for_its_last_block(echo_job):
    job, plain = echo_job(40), echo_job(40)
    prior = "The other prompt is rather long, and the same for all of them:"
    alone = plain.submit(task="choose", choice=["a", "b"])
    outcome = job.submit(task="choose", choice=["a", "b"], choice_prior=prior, overwrite=True)
    num_rows = outcome.rows - outcome.duplicates
    assert outcome.computed_tokens - alone.computed_tokens <= 1 + len(prior) + num_rows * 16 < num_rows * len(prior)


def test_choices_that_cannot_stand_behind_the_other_prompt_are_refused(echo_job):
    with pytest.raises(UsageError, match=r"--choice-prior has 1,0\d\d tokens with its longest choice, more than"):
        echo_job(2).submit(task="choose", choice=CHOICES, choice_prior="x" * 1000, max_model_len=1000)
    with pytest.raises(UsageError, match="--choice-prior is for --task choose, not generate"):
        echo_job(2).submit(choice_prior="x")


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_rows_are_embedded(echo_job, pooling):
    job = echo_job(30)
    job.submit(task="embed", pooling=pooling, embedding_norm="none", **SMALL)
    schema = pq.read_schema(next(job.out.glob("*.parquet")))
    assert schema.field("embedding").type == pa.list_(pa.field("element", pa.float32()), HIDDEN_SIZE)
    for prompt, row in zip(job.prompts, job.rows(), strict=True):
        context = entries(EchoTokenizer().encode([prompt], add_special_tokens=True)[0], 0)
        states = [hidden(context[:end]) for end in range(1, len(context) + 1)]
        expected = states[-1] if pooling == "last" else np.sum(states, axis=0) / len(states)
        assert row["embedding"] == pytest.approx(expected.tolist(), rel=1e-6)
    assert verify(job.out).is_ok


def test_embeddings_have_length_one_unless_told_otherwise(echo_job):
    job = echo_job(10)
    job.submit(task="embed")
    assert [np.linalg.norm(row["embedding"]) for row in job.rows()] == pytest.approx([1] * 10)


def test_texts_without_a_prompt_are_scored_whole_in_windows(tmp_path):
    texts = ["short", "a text that is longer than a window", None, ""]
    pq.write_table(pa.table({"text": pa.array(texts, pa.string())}), tmp_path / "in.parquet")
    options = {"model": "echo", "task": "score", "target_col": "text", "max_model_len": 8}
    plan = br.plan(tmp_path / "in.parquet", **options)
    assert plan.summary.prompt_source == "whole texts of column 'text'"
    outcome = br.submit(tmp_path / "in.parquet", output=tmp_path / "out", **options)
    rows = pq.read_table(outcome.output).to_pylist()
    assert [row["target_tokens"] for row in rows] == [5, 35, None, None]
    ids = [1, *EchoTokenizer().encode([texts[1]], add_special_tokens=False)[0].tolist()]
    spans = [(0, 8), (8, 16), (16, 24), (24, 32), (27, 35)]  # computed; the last reaches back
    expected: list[float] = []
    for start, end in spans:
        context = entries(np.array(ids[start:end], np.int32), 0)
        done = len(expected)
        expected += [logprob(context[: at - start + 1], ids[at + 1])[0] for at in range(done, end)]
    assert rows[1]["target_logprobs"] == expected
    assert [row["error"] and row["error"]["type"] for row in rows] == [None, None, "empty_prompt", "empty_prompt"]


def test_a_target_that_does_not_fit_is_that_rows_error(tmp_path):
    table = pa.table({"prompt": ["abcdefgh", "abcdefgh"], "target": ["12", "1234"]})
    options = {"model": "echo", "target_col": "target", "max_model_len": 10}
    scored = br.score(table, **options).to_pylist()
    assert scored[0]["target_logprob"] == sum(logprobs("abcdefgh", "12"))
    assert scored[1]["error"]["type"] == "overlong_prompt"
    cut = br.score(table, **options, on_overlong="truncate-left").to_pylist()
    assert [(row["prompt_tokens"], row["target_tokens"]) for row in cut] == [(9, 2), (7, 4)]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"task": "score"}, "--target-col"),
        ({"task": "choose"}, "--choices-col"),
        ({"task": "choose", "choice": ["yes"]}, "twice or more"),
        ({"task": "choose", "choice": ["yes", "no"], "choices_col": "c"}, "--choices-col"),
        ({"task": "score", "target_col": "t", "temperature": 0.5}, "--temperature is for --task generate"),
        ({"target_col": "t"}, "--target-col is for --task score"),
        ({"task": "score", "target_col": "t", "on_overlong": "truncate-right"}, "cut left"),
        ({"task": "embed", "pooling": "mean", "deterministic": True}, "--deterministic"),
    ],
)
def test_options_of_another_task_are_refused(echo_job, options, said):
    with pytest.raises(UsageError, match=re.escape(said)):
        echo_job(2).job(**options)


def test_columns_that_do_not_fit_are_refused(echo_job):
    job = echo_job(2)
    pq.write_table(pq.read_table(job.source).append_column("bytes", pa.array([[b"a", b"b"]] * 2)), job.source)
    with pytest.raises(DataError, match=r"column 'bytes' is list<.*binary>; make it a list of texts"):
        job.submit(task="choose", choices_col="bytes")
    with pytest.raises(DataError, match="--choices-col: column 'prompt' is string; make it a list of texts"):
        job.submit(task="choose", choices_col="prompt")
    with pytest.raises(DataError, match="--target-col"):
        job.submit(task="score", target_col="targt")


@pytest.mark.parametrize("how", ["one by one", "together"])
def test_a_row_of_several_requests_that_the_engine_fails_on_is_a_row_with_an_error(echo_job, monkeypatch, how):
    """Its chains are no reason to take the engine for broken, nor for several processes that ended."""
    job = echo_job(12)
    monkeypatch.setattr(EchoRunner, "launch", failing_on({3}))
    options = {"max_num_seqs": 1} if how == "one by one" else {}
    job.submit(task="choose", choice=("aa", "ab", "bc", "cd"), **options)
    failed = {row["row_idx"]: row["error"]["type"] for row in job.rows() if row["error"]}
    assert failed == {at: "engine_error" for at, prompt in enumerate(job.prompts) if prompt == job.prompts[3]}


def test_a_lone_row_of_several_requests_that_fails_is_a_row_with_an_error(echo_job, monkeypatch):
    job = echo_job(1)
    monkeypatch.setattr(EchoRunner, "launch", failing_on({0}))
    assert job.submit(task="choose", choice=("aa", "ab", "bc", "cd")).errors == {"engine_error": 1}


def test_a_process_that_ended_is_counted_once_for_a_row_of_several_requests(echo_job, monkeypatch):
    job = echo_job(2)
    with monkeypatch.context() as lost:
        lost.setattr(EchoRunner, "launch", failing_on({0, 1}))
        with pytest.raises(EngineFailed):
            job.submit(task="choose", choice=("aa", "ab", "bc", "cd"))
    assert job.submit(task="choose", choice=("aa", "ab", "bc", "cd")).errors == {}


def failing_on(rows):
    """A runner's `launch` with which no step of these rows can be computed."""
    launch = EchoRunner.launch

    def launched(self, batch):
        if any(item.sequence.request.row_idx in rows for item in batch.items):
            raise RuntimeError("a kernel fell over")
        return launch(self, batch)

    return launched


def test_a_retry_may_not_cut_what_a_target_stands_behind(echo_job):
    job = echo_job(6)
    write(job)
    job.submit(task="score", target_col="target")
    before = job.result()
    with pytest.raises(UsageError, match="truncate-right would cut what --task score continues"):
        retry(job.out, "true", {"on_overlong": "truncate-right"}, ignore, StopRequest())
    assert job.result() == before
    assert verify(job.out).is_ok


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (("score", "--target-col", "target"), r"scores +\d+ target tokens"),
        (("choose", "--choices-col", "choices"), r"chooses +\d+ tokens of choices · \d+ to compute behind the prompts"),
        (("embed",), r"embeds +7 rows"),
    ],
)
def test_a_plan_says_what_is_asked(echo_job, task, said):
    job = echo_job(7)
    write(job)
    planned = job.call("plan", str(job.source), "-m", "echo", "-o", str(job.out), "--task", *task)
    assert planned.returncode == 0, planned.stderr
    assert re.search(said, planned.stdout), planned.stdout
    assert "\ntime" not in planned.stdout


def test_a_plan_knows_how_many_rows_are_done(echo_job) -> None:
    job = echo_job(5)
    assert planning.num_done(job.job()) == 0
    job.submit()
    assert planning.num_done(job.job()) == 5


def test_failed_rows_run_again_and_no_sampling_option_is_taken(echo_job):
    job = echo_job(8)
    write(job)
    job.submit(task="score", target_col="target")
    before = job.rows()
    assert job.call("retry", str(job.out)).returncode == 0
    assert job.rows() == before
    refused = job.call("retry", str(job.out), "--max-tokens", "5")
    assert refused.returncode == 2
    assert "--task score samples nothing" in refused.stderr


def test_answers_of_an_earlier_job_are_copied(echo_job, tmp_path):
    job = echo_job(20)
    write(job)
    job.submit(task="choose", choice=CHOICES)
    outcome = job.submit(task="choose", choice=CHOICES, output=str(tmp_path / "again"), reuse=str(job.out))
    assert (outcome.reused, outcome.computed_tokens) == (20, 0)
    assert pq.read_table(tmp_path / "again").to_pylist() == job.rows()


def test_python_gives_back_the_kind_it_was_given(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    frame = pd.DataFrame({"prompt": ["one", "two"], "target": ["a", "b"]}, index=[4, 2])
    scored = br.score(frame, model="echo", target_col="target")
    assert scored.index.tolist() == [4, 2]
    assert scored["target_logprob"].tolist() == [sum(logprobs("one", "a")), sum(logprobs("two", "b"))]
    chosen = br.choose(frame, model="echo", choice=["a", "b"])
    assert set(chosen["label"]) <= {"a", "b"}
    assert br.embed(frame, model="echo")["embedding"].map(len).tolist() == [HIDDEN_SIZE] * 2


@pytest.mark.parametrize(
    "task", [("score", "--target-col", "target"), ("choose", *(f"--choice={text}" for text in CHOICES)), ("embed",)]
)
def test_a_killed_job_ends_like_one_that_never_was(echo_job, tmp_path, task):
    """Killed once the first part is there; rows of which only some choices were computed start again."""
    slow = ("--task", *task, "--max-num-seqs", "3", "--max-num-batched-tokens", "24", "--checkpoint-every", "0.05s")
    undisturbed, job = echo_job(1500, tmp_path / "undisturbed"), echo_job(1500, tmp_path / "killed")
    for one in (undisturbed, job):
        write(one)
    assert undisturbed.call("submit", *slow).returncode == 0
    process = job.start("submit", *slow)
    while process.poll() is None and not list((tmp_path / "killed").glob("out.batchrun/parts/*.parquet")):
        pass
    process.kill()
    process.communicate()
    resumed = job.call("resume", str(job.out))
    assert resumed.returncode == 0, resumed.stderr
    assert job.result() == undisturbed.result()


def test_prompts_and_targets_may_be_token_ids(echo_job):
    """They are taken as they are: a BOS is neither added nor, doubled, taken away."""
    job = echo_job(1)
    prompts = [[1, 1, 70, 71], [70], [70], None, [], [70, None], [70, 259]]
    targets = [[72], [71, 72], [], [71], [71], [71], [71]]
    kind = pa.list_(pa.int64())
    pq.write_table(pa.table({"prompt": pa.array(prompts, kind), "target": pa.array(targets, kind)}), job.source)
    outcome = job.submit(task="score", target_col="target")
    assert outcome.errors == {"empty_prompt": 2, "empty_target": 1, "invalid_params": 2}
    rows = job.rows()
    for prompt, target, row in zip(prompts[:2], targets, rows, strict=False):
        context = entries(np.array(prompt + target), 0)
        expected = [logprob(context[:at], target[at - len(prompt)])[0] for at in range(len(prompt), len(context))]
        assert (row["target_logprobs"], row["prompt_tokens"]) == (expected, len(prompt))
    assert [row["error"]["message"] for row in rows[2:]] == [
        "row 2: column 'target' is empty; fill it or filter the row out",
        "row 3: column 'prompt' is null; fill it or filter the row out",
        "row 4: column 'prompt' is empty; fill it or filter the row out",
        "row 5: column 'prompt' has a null, and the model's are 0 to 258; tokenise it for this model",
        "row 6: column 'prompt' has the token 259, and the model's are 0 to 258; tokenise it for this model",
    ]


def test_token_ids_are_answered_as_their_text_is(echo_job):
    texts = pa.table({"prompt": ["What of it?", "And this?"]})
    ids = [ids.tolist() for ids in EchoTokenizer().encode(texts.column("prompt").to_pylist(), add_special_tokens=True)]
    tokens = pa.table({"prompt": pa.array(ids, pa.list_(pa.uint32()))})
    expected, found = (br.generate(table, model="echo", max_tokens=9) for table in (texts, tokens))
    assert found.column("text").to_pylist() == expected.column("text").to_pylist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "score", "target_col": "wanted"}, "--target-col: give prompts and targets both as text, or both as"),
        (
            {"task": "choose", "choice": ["a", "b"]},
            "--task choose puts texts behind prompts, and the prompts are token",
        ),
        ({"chat": "on"}, "--chat on and --system need texts, and token ids in column 'prompt' are taken as they are"),
    ],
)
def test_what_needs_text_is_refused_for_token_ids(echo_job, options, message):
    job = echo_job(1)
    table = pa.table({"prompt": pa.array([[70]], pa.list_(pa.int32())), "wanted": ["x"]})
    pq.write_table(table, job.source)
    with pytest.raises((DataError, UsageError), match=message):
        job.submit(**options)
