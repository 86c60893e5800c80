"""From record batches to token ids, with every bad row an error of its own."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from batchrun.errors import DataError, RowError, UsageError
from batchrun.job import Job
from batchrun.model_spec import ModelSpec
from batchrun.plan.prompt import PromptRenderer, Rendered
from batchrun.tokenizer import Conversation, EchoTokenizer

MakeJob = Callable[..., Job]


class ChatTokenizer(EchoTokenizer):
    """Writes "role:content|" for each message; refuses conversations about bombs, as some templates do."""

    has_chat_template = True

    def chat(self, conversations: list[Conversation]) -> list[str]:
        texts = ["".join(f"{message['role']}:{message['content']}|" for message in each) for each in conversations]
        if any("bomb" in text for text in texts):
            raise ValueError("no bombs")
        return texts


class DoubleBosTokenizer(EchoTokenizer):
    """Reads the text <s> as BOS, as tokenizers do with the text of a special token."""

    def encode(self, texts: list[str], *, add_special_tokens: bool) -> list[Any]:
        encoded = super().encode([text.removeprefix("<s>") for text in texts], add_special_tokens=add_special_tokens)
        mark = np.array([1], dtype=np.int32)
        return [
            np.concatenate([mark, ids]) if text.startswith("<s>") else ids
            for text, ids in zip(texts, encoded, strict=True)
        ]


def batch(start: int = 0, **columns: Any) -> pa.RecordBatch:
    num_rows = len(next(iter(columns.values())))
    return pa.record_batch({"row_idx": pa.array(range(start, start + num_rows)), **columns})


def renderer(job: Job, rows: pa.RecordBatch, spec: ModelSpec, tokenizer: EchoTokenizer | None = None) -> PromptRenderer:
    return PromptRenderer(job, tokenizer or EchoTokenizer(), spec, pa.schema(list(rows.schema)[1:]))


def texts(rendered: Rendered) -> list[str | RowError]:
    decoded = EchoTokenizer().decode_batch(rendered.token_ids)
    return [error or text for error, text in zip(rendered.errors, decoded, strict=True)]


def types(rendered: Rendered) -> list[str | None]:
    return [error and error.type for error in rendered.errors]


def with_bad_utf8(kind: pa.DataType) -> pa.Array:
    raw = pa.array([b"good", b"\xc3(", None, b""], pa.large_binary() if kind == pa.large_string() else pa.binary())
    return raw if kind == pa.binary() else pa.Array.from_buffers(kind, 4, raw.buffers())


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary()])
def test_bad_cells_of_a_text_column_cost_only_their_rows(job: MakeJob, spec: ModelSpec, kind: pa.DataType) -> None:
    rows = batch(start=10, t=with_bad_utf8(kind))
    assert texts(renderer(job(prompt_col="t"), rows, spec).render(rows)) == [
        "good",
        RowError("invalid_utf8", "row 11: column 't' is not UTF-8 (byte 0xc3 at offset 0); re-encode it"),
        RowError("empty_prompt", "row 12: column 't' is null; fill it or filter the row out"),
        RowError("empty_prompt", "row 13: column 't' is empty; fill it or filter the row out"),
    ]


def test_dictionary_and_all_null_columns_are_text(job: MakeJob, spec: ModelSpec) -> None:
    rows = batch(t=pa.array(["a", "b", "a"]).dictionary_encode(), n=pa.nulls(3))
    assert texts(renderer(job(prompt_col="t"), rows, spec).render(rows)) == ["a", "b", "a"]
    assert types(renderer(job(prompt_col="n"), rows, spec).render(rows)) == ["empty_prompt"] * 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_col": "n"}, "--prompt-col: column 'n' is int64, not text; -t '{{ n }}' makes text of it"),
        ({"prompt_col": "tt"}, "--prompt-col: the input has no column 'tt'; did you mean 't'"),
        ({"messages_col": "n", "chat": "on"}, "--messages-col: column 'n' is int64; make it a list of role"),
        ({"prompt_col": "t", "params_col": "n"}, "--params-col: column 'n' is int64; make it a struct"),
        ({}, "no column is called prompt, messages or text"),
    ],
)
def test_column_that_cannot_serve_is_refused(
    job: MakeJob, spec: ModelSpec, fields: dict[str, str], message: str
) -> None:
    rows = batch(n=[1], t=["a"])
    with pytest.raises(DataError, match=message):
        renderer(job(**fields), rows, spec)


def test_well_known_column_is_the_default(job: MakeJob, spec: ModelSpec) -> None:
    rows = batch(text=["a"], prompt=["b"])
    found = renderer(job(), rows, spec)
    assert (found.columns, found.label) == (("prompt",), "column 'prompt'")


def test_chat_template_wraps_prompts_and_adds_no_bos(job: MakeJob, spec: ModelSpec) -> None:
    rows = batch(t=["hi", "bomb", None])
    made = renderer(job(prompt_col="t", system="be brief"), rows, spec, ChatTokenizer())
    rendered = made.render(rows)
    assert texts(rendered)[0] == "system:be brief|user:hi|"
    assert rendered.token_ids[0][0] != 1
    assert rendered.sample == "system:be brief|user:hi|"
    assert texts(rendered)[1] == RowError(
        "template_error", "row 1: the chat template refuses it: ValueError: no bombs; correct the messages"
    )
    assert types(rendered) == [None, "template_error", "empty_prompt"]
    assert made.label == "column 't', chat template"


def test_chat_off_takes_the_text_with_bos(job: MakeJob, spec: ModelSpec) -> None:
    rows = batch(t=["hi"])
    rendered = renderer(job(prompt_col="t", chat="off"), rows, spec, ChatTokenizer()).render(rows)
    assert rendered.token_ids[0].tolist() == [1, ord("h") + 3, ord("i") + 3]


def test_bos_is_not_doubled(job: MakeJob, spec: ModelSpec) -> None:
    rows = batch(t=["<s>a", "a"])
    rendered = renderer(job(prompt_col="t"), rows, spec, DoubleBosTokenizer()).render(rows)
    assert [ids.tolist() for ids in rendered.token_ids] == [[1, ord("a") + 3]] * 2


@pytest.mark.parametrize("as_json", [False, True])
def test_messages_column(job: MakeJob, spec: ModelSpec, as_json: bool) -> None:
    conversations: list[Any] = [
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        [{"role": "system", "content": "own"}, {"role": "user", "content": "c"}],
        [],
        None,
        [{"role": "user", "content": None}],
    ]
    cells = [json.dumps(each) if as_json and each is not None else each for each in conversations]
    rows = batch(messages=cells)
    rendered = renderer(job(system="sys"), rows, spec, ChatTokenizer()).render(rows)
    assert texts(rendered)[:2] == ["system:sys|user:a|assistant:b|", "system:own|user:c|"]
    assert types(rendered)[2:] == ["empty_prompt", "empty_prompt", "template_error"]


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        ('{"role": "user"}', "should be a list of messages, not dict"),
        ('["hi"]', "message 0 should have role and content, not be str"),
        ('[{"role": "user"}]', "message 0: 'content' should be text, not NoneType"),
        ("hello", "column 'messages': not JSON (Expecting value: line 1 column 1 (char 0)); correct it"),
        ("[" * 100_000, "column 'messages': nested too deeply; correct it"),
    ],
)
def test_wrong_messages_say_what_is_wrong(job: MakeJob, spec: ModelSpec, cell: str, reason: str) -> None:
    rows = batch(messages=[cell])
    (error,) = renderer(job(), rows, spec, ChatTokenizer()).render(rows).errors
    assert error is not None
    assert error.type == "template_error"
    assert error.message.startswith("row 0: column 'messages': ")
    assert reason in error.message


def test_half_a_surrogate_pair_is_invalid_utf8(job: MakeJob, spec: ModelSpec) -> None:
    rows = batch(messages=[r'[{"role": "user", "content": "\ud800"}]', '[{"role": "user", "content": "b"}]'])
    rendered = renderer(job(), rows, spec, ChatTokenizer()).render(rows)
    assert types(rendered) == ["invalid_utf8", None]
    assert texts(rendered)[1] == "user:b|"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_col": "t", "chat": "on"}, "echo has no chat template: give one with --chat-template, or --chat off"),
        ({"messages_col": "m"}, "messages in column 'm' need a chat template"),
        ({"prompt_col": "t", "system": "x"}, "--system needs a chat template"),
        ({"prompt_col": "t", "max_model_len": 1001}, "--max-model-len 1,001 is more than echo's 1,000"),
    ],
)
def test_what_the_model_cannot_do_is_a_usage_error(
    job: MakeJob, spec: ModelSpec, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        renderer(job(**fields), batch(t=["a"], m=["[]"]), spec)


def test_params_column(job: MakeJob, spec: ModelSpec) -> None:
    cells = [{"temperature": 0.5, "max_tokens": None}, None, {"temperature": -1.0, "max_tokens": 3}]
    rows = batch(t=["a", "b", "c"], p=cells)
    rendered = renderer(job(prompt_col="t", params_col="p"), rows, spec).render(rows)
    assert rendered.params == ['{"temperature":0.5}', None, None]
    assert rendered.errors == [
        None,
        None,
        RowError(
            "invalid_params",
            "row 2: column 'p': temperature should be greater than or equal to 0, not -1.0; "
            "correct it, or null for the job's",
        ),
    ]


def overlong(job: MakeJob, spec: ModelSpec, text: str, **fields: Any) -> Rendered:
    rows = batch(t=["ok", text])
    return renderer(job(prompt_col="t", max_model_len=20, max_tokens=5, **fields), rows, spec).render(rows)


def test_prompt_that_leaves_no_room_for_a_token_is_overlong(job: MakeJob, spec: ModelSpec) -> None:
    assert types(overlong(job, spec, "x" * 18)) == [None, None]
    error = overlong(job, spec, "x" * 19).errors[1]
    assert error is not None
    assert error.type == "overlong_prompt"
    assert error.message == (
        "row 1: the prompt has at least 20 tokens, more than the 19 that --max-model-len 20 has room for; "
        "shorten it, or --on-overlong truncate-left"
    )


def test_overlong_prompt_can_be_cut_or_fail_the_job(job: MakeJob, spec: ModelSpec) -> None:
    """A cut prompt leaves room for the answer and keeps its BOS."""
    text = "".join(chr(ord("a") + number) for number in range(26))
    right = overlong(job, spec, text, on_overlong="truncate-right").token_ids[1].tolist()
    left = overlong(job, spec, text, on_overlong="truncate-left").token_ids[1].tolist()
    assert right == [1, *(byte + 3 for byte in text[:14].encode())]
    assert left == [1, *(byte + 3 for byte in text[-14:].encode())]
    with pytest.raises(DataError, match="row 1: the prompt has"):
        overlong(job, spec, text, on_overlong="fail")


def test_cut_prompt_keeps_half_of_the_length_at_least(job: MakeJob, spec: ModelSpec) -> None:
    rows = batch(t=["x" * 50])
    made = renderer(
        job(prompt_col="t", max_model_len=20, max_tokens=256, on_overlong="truncate-right"), rows, spec
    ).render(rows)
    assert len(made.token_ids[0]) == 10


class CountingTokenizer(EchoTokenizer):
    """Counts the characters that it is given."""

    def __init__(self) -> None:
        self.num_chars = 0

    def encode(self, texts: list[str], *, add_special_tokens: bool) -> list[Any]:
        self.num_chars += sum(map(len, texts))
        return super().encode(texts, add_special_tokens=add_special_tokens)


@pytest.mark.parametrize("on_overlong", ["error", "truncate-left", "truncate-right"])
def test_huge_prompt_is_not_tokenised_whole(job: MakeJob, spec: ModelSpec, on_overlong: str) -> None:
    """And comes out as if it had been."""
    text = "start" + "x" * (3 << 20) + "end"
    rows = batch(t=[text])
    tokenizer = CountingTokenizer()
    made = renderer(job(prompt_col="t", on_overlong=on_overlong, max_tokens=900), rows, spec, tokenizer)
    (outcome,) = texts(made.render(rows))
    assert tokenizer.num_chars < len(text) // 2
    if on_overlong == "error":
        assert isinstance(outcome, RowError)
    else:
        assert outcome == (text[:499] if on_overlong == "truncate-right" else text[-499:])


def test_huge_text_of_few_tokens_is_tokenised_whole(job: MakeJob, spec: ModelSpec) -> None:
    class OneTokenTokenizer(EchoTokenizer):
        def encode(self, texts: list[str], *, add_special_tokens: bool) -> list[Any]:
            return [np.array([len(text)], dtype=np.int32) for text in texts]

    rows = batch(t=["x" * (2 << 20)])
    rendered = renderer(job(prompt_col="t"), rows, spec, OneTokenTokenizer()).render(rows)
    assert rendered.token_ids[0].tolist() == [2 << 20]


def test_so_is_one_with_a_target_behind_it(job: MakeJob, spec: ModelSpec) -> None:
    """Only letters other than x are tokens."""

    class SparseTokenizer(EchoTokenizer):
        def encode(self, texts: list[str], *, add_special_tokens: bool) -> list[Any]:
            return super().encode([text.replace("x", "") for text in texts], add_special_tokens=False)

    rows = batch(t=["a" + "x" * (2 << 20) + "b"] * 2, target=["c", "cc"])
    made = renderer(job(prompt_col="t", task="score", target_col="target"), rows, spec, SparseTokenizer())
    assert texts(made.render(rows)) == ["abc", "abcc"]
