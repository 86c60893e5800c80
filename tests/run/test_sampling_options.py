"""Every sampling option and what would not be so if it were ignored, from the option to the result, on a tiny model.

`OPTIONS` is the table: a line for each. What exactly an option does to logits is compared with plain Python in
`tests/device/test_sampling.py`.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from batchrun.engine.echo import EOS_TOKEN_ID, FIRST_BYTE
from batchrun.engine.model import Model
from batchrun.engine.request import SamplingParams
from batchrun.engine.runner import TorchRunner
from batchrun.engine.runner_options import RunnerOptions
from batchrun.executors import local
from batchrun.job import Job
from tests.device.tiny_families import make_model
from tests.run.conftest import EchoJob

PROMPTS = ["xyz", "yxzx", "zz", "xy", "yz", "zyxz", "y", "zxy"]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
Rows = list[dict[str, Any]]
Run = Callable[..., Rows]


def token(letter: str) -> int:
    """Of the tokenizer of `-m echo`, a token a byte."""
    return FIRST_BYTE + ord(letter)


def texts(rows: Rows) -> list[str]:
    return [row["text"] for row in rows]


def is_greedy(rows: Rows, run: Run) -> bool:
    return texts(rows) == texts(run())


@dataclass(frozen=True)
class Option:
    """`value` is tried beside `others`; `holds` says of the rows without it, and those with it, what it promises.

    A row without it must not hold to the promise, else nothing is shown.
    """

    value: Any
    holds: Callable[[Rows, Run], bool]
    others: dict[str, Any] = field(default_factory=dict)


def ends(rows: Rows, reason: str, stop: str | None = None) -> bool:
    found = [(row["finish_reason"], row["stop_reason"]) for row in rows]
    return (reason, stop) in found


A_AND_B_IN_TURN = {"logit_bias": {token("a"): 90, token("b"): 90}, "bad_words": ["aa", "bb"]}
RANDOM = {"temperature": 3.0}
OPTIONS = {
    "max_tokens": Option(5, lambda rows, run: max(row["completion_tokens"] for row in rows) == 5),
    "min_tokens": Option(15, lambda rows, run: min(row["completion_tokens"] for row in rows) >= 15),
    "temperature": Option(2.0, lambda rows, run: not is_greedy(rows, run)),
    "top_p": Option(1e-6, is_greedy, RANDOM),
    "top_k": Option(1, is_greedy, RANDOM),
    "min_p": Option(1.0, is_greedy, RANDOM),
    "repetition_penalty": Option(
        1e6, lambda rows, run: all(len({*text} - {*"xyz"}) == len(text) for text in texts(rows)), {"max_tokens": 6}
    ),
    "presence_penalty": Option(2.0, lambda rows, run: num_distinct(rows) > num_distinct(run())),
    "frequency_penalty": Option(2.0, lambda rows, run: most_frequent(rows) < most_frequent(run())),
    "stop": Option(
        [*LETTERS[:13]],
        lambda rows, run: (
            not {*"".join(texts(rows))} & {*LETTERS[:13]} and any(ends(rows, "stop", letter) for letter in LETTERS[:13])
        ),
    ),
    "stop_token_ids": Option([token("a")], lambda rows, run: ends(rows, "stop", str(token("a")))),
    "ignore_eos": Option(True, lambda rows, run: not ends(rows, "stop")),
    "seed": Option(5, lambda rows, run: texts(rows) != texts(run(**RANDOM)), RANDOM),
    "logit_bias": Option({token("q"): 100}, lambda rows, run: {*"".join(texts(rows))} == {"q"}),
    "bad_words": Option([*LETTERS[:20]], lambda rows, run: not {*"".join(texts(rows))} & {*LETTERS[:20]}),
    "repetition_min_count": Option(
        3,
        lambda rows, run: {(row["finish_reason"], row["completion_tokens"]) for row in rows} == {("repetition", 6)},
        A_AND_B_IN_TURN,
    ),
    "repetition_max_pattern_size": Option(
        1, lambda rows, run: not ends(rows, "repetition"), A_AND_B_IN_TURN | {"repetition_min_count": 3}
    ),
    "reasoning_end": Option(
        "a",
        lambda rows, run: (
            [(row.get("reasoning"), row["text"]) for row in rows]
            == [(text.split("a", 1)[0], "".join(text.split("a", 1)[1:])) for text in texts(run())]
        ),
    ),
    "reasoning_start": Option(
        "b",
        lambda rows, run: (
            [row["reasoning"] for row in rows] == [row["reasoning"].removeprefix("b") for row in run(**STARTING_WITH_B)]
        ),
        STARTING_WITH_B := {"logit_bias": {token("b"): 8}, "reasoning_end": "a"},
    ),
    "n": Option(2, lambda rows, run: [row.get("sample_idx") for row in rows] == [0, 1] * len(PROMPTS), RANDOM),
    "num_beams": Option(4, lambda rows, run: not is_greedy(rows, run)),
    "length_penalty": Option(
        6.0, lambda rows, run: num_tokens(rows) > num_tokens(run(**SEARCHED)), SEARCHED := {"num_beams": 4}
    ),
    "early_stopping": Option(
        "true", lambda rows, run: texts(rows) != texts(run(**LONG)), LONG := SEARCHED | {"length_penalty": 6.0}
    ),
    "logprobs": Option(2, lambda rows, run: all(len(row.get("logprobs", [])) > 0 for row in rows)),
    "json_schema": Option({"type": "boolean"}, lambda rows, run: {*texts(rows)} <= {"true", "false"}),
    "regex": Option("[ab]{3}", lambda rows, run: all(len(text) == 3 and {*text} <= {*"ab"} for text in texts(rows))),
    "guided_choice": Option(["yes", "no"], lambda rows, run: {*texts(rows)} <= {"yes", "no"}),
    "grammar": Option('start: "abc" | "xyz"', lambda rows, run: {*texts(rows)} <= {"abc", "xyz"}),
}
OF_A_ROW = [name for name in OPTIONS if name in {each.name for each in fields(SamplingParams)}]


def num_tokens(rows: Rows) -> int:
    return sum(row["completion_tokens"] for row in rows)


def num_distinct(rows: Rows) -> int:
    return sum(len({*text}) for text in texts(rows))


def most_frequent(rows: Rows) -> int:
    return sum(max(map(text.count, text), default=0) for text in texts(rows))


@pytest.fixture(scope="module")
def model() -> Model:
    """Says lower-case letters, and ends now and then."""
    module = make_model("llama", seed=5, vocab_size=259, hidden_size=32, head_dim=8)
    bias = torch.full((259,), -60.0)
    bias[[token(letter) for letter in LETTERS]] = 0.0
    bias[EOS_TOKEN_ID] = 1.0
    head = torch.nn.Linear(32, 259)
    with torch.no_grad():
        head.weight.copy_(module.lm_head.weight)
        head.bias.copy_(bias)
    module.lm_head = head
    return Model.adopt(module)


@pytest.fixture
def run(model: Model, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The rows of a job with these options, or with these parameters of every row."""
    options = RunnerOptions(block_size=4, kv_cache_memory=1 << 20)
    monkeypatch.setattr(
        local, "build_runner", lambda job, checkpoint, place: TorchRunner.lay_out(model, options, (EOS_TOKEN_ID,))
    )
    counter = iter(range(100))

    def answers(params: dict[str, Any] | None = None, **given: Any) -> Rows:
        job = EchoJob(tmp_path / str(next(counter)), PROMPTS)
        job.folder.mkdir()
        cells = [None if params is None else json.dumps(params)] * len(PROMPTS)
        pq.write_table(pa.table({"prompt": PROMPTS, "params": cells}), job.source)
        job.submit(**{"max_tokens": 30, "chat": "off", "params_col": "params", "block_size": 4} | given)
        return job.rows()

    return answers


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_does_what_it_promises(run: Run, name: str) -> None:
    option = OPTIONS[name]
    assert not option.holds(run(**option.others), run), "so it is without the option, too"
    assert option.holds(run(**{name: option.value}, **option.others), run)


@pytest.mark.parametrize("name", OF_A_ROW)
def test_a_row_s_own_parameter_does_the_same(run: Run, name: str) -> None:
    option = OPTIONS[name]
    others = {key: value for key, value in option.others.items() if key != name}
    assert texts(run({name: option.value}, **others)) == texts(run(**{name: option.value}, **others))


def test_every_sampling_option_is_in_the_table() -> None:
    groups = {
        name: extra["group"]
        for name, each in Job.model_fields.items()
        if isinstance(extra := each.json_schema_extra, dict)
    }
    assert {name for name, group in groups.items() if group == "Sampling"} == {*OPTIONS}
    assert {each.name for each in fields(SamplingParams)} <= {*OPTIONS}


def test_samples_are_what_single_runs_with_the_seeds_behind_say(run: Run) -> None:
    """Though eight of them read the same blocks of their prompt."""
    together = run(n=8, temperature=1.0, seed=20)
    assert len({row["text"] for row in together[:8]}) > 1
    for sample in range(8):
        assert texts(run(temperature=1.0, seed=20 + sample)) == texts(together[sample::8])


def test_stops_are_for_the_answer_and_not_for_what_is_thought_before(run: Run) -> None:
    """Strings and tokens; also one that lies across the end of the reasoning is none."""
    letters = [*LETTERS[2:]]
    plain = run(reasoning_end="a")
    stopped = run(reasoning_end="a", stop=letters)
    by_token = run(reasoning_end="a", stop_token_ids=[token(letter) for letter in letters])
    assert [row["reasoning"] for row in stopped] == [row["reasoning"] for row in plain]
    assert any(len(row["reasoning"]) > 2 and row["text"] for row in plain)
    for row, other, before in zip(stopped, by_token, plain, strict=True):
        expected = before["text"][
            : min([before["text"].index(one) for one in letters if one in before["text"]] or [99])
        ]
        assert row["text"] == expected
        assert other["text"][: len(expected)] == expected
        assert other["completion_tokens"] == row["completion_tokens"]


def test_a_stop_string_before_min_tokens_is_none(run: Run) -> None:
    """The text is not cut there when the row stops at a later one."""
    rows = run(stop=[*LETTERS], min_tokens=10)
    assert [len(row["text"]) for row in rows] == [9] * len(PROMPTS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logit_bias": {259: 1}}, "logit_bias names the token 259; the model has those from 0 to 258"),
        ({"stop_token_ids": [300]}, "stop_token_ids names the token 300"),
    ],
)
def test_a_token_that_the_model_has_not_is_refused(run: Run, options: dict[str, Any], message: str) -> None:
    rows = run(options)
    assert {row["error"]["type"] for row in rows} == {"invalid_params"}
    assert message in rows[0]["error"]["message"]
