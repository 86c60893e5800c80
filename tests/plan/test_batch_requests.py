"""Input of the OpenAI Batch API: told from other JSON Lines, read, and planned with each request's own parameters."""

import json

import pyarrow as pa
import pytest

from batchrun.errors import DataError, UsageError
from batchrun.plan.batch_requests import SCHEMA
from batchrun.plan.planner import make_plan
from batchrun.plan.source import expand, scan
from batchrun.tokenizer import EchoTokenizer
from tests.plan.test_prompt import ChatTokenizer


def request(name, url="/v1/chat/completions", **body):
    body = {"model": "gpt-x", "messages": [{"role": "user", "content": f"Hello {name}"}], **body}
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


@pytest.fixture
def write(tmp_path):
    def write_lines(*requests, name="batch.jsonl"):
        path = tmp_path / name
        path.write_text("\n".join(json.dumps(each) for each in requests) + "\n\n")
        return path

    return write_lines


@pytest.fixture
def planned(job, spec, tmp_path):
    """Plans a file; the texts and parameters, or the error, of each row."""

    def plan(path, tokenizer=None, **options):
        made = make_plan(
            job(inputs=(str(path),), **options),
            expand([str(path)]),
            tokenizer or ChatTokenizer(),
            spec,
            tmp_path / "plan",
        )
        tables = [pa.ipc.open_file(unit.path).read_all() for unit in made.units]
        rows = sorted((row for table in tables for row in table.to_pylist()), key=lambda row: row["row_idx"])
        texts = EchoTokenizer().decode_batch([row["token_ids"] for row in rows])
        return [(row["error"] or text, row["params"]) for row, text in zip(rows, texts, strict=True)]

    return plan


def test_bodies_become_conversations_and_parameters(planned, write):
    path = write(
        request("a", max_tokens=8, temperature=0.5, stop="x", seed=7, n=1, stream=False, user="me"),
        request("b", max_completion_tokens=9, stop=["x", "y"], top_p=None, temperature=0),
        request(
            "c",
            messages=[
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]},
            ],
        ),
    )
    assert planned(path) == [
        ("user:Hello a|", '{"max_tokens":8,"seed":7,"stop":["x"],"temperature":0.5}'),
        ("user:Hello b|", '{"max_tokens":9,"stop":["x","y"]}'),
        ("system:Be brief.|user:Hi there|", None),
    ]


@pytest.mark.parametrize(
    ("wrong", "kind", "message"),
    [(request("b", tools=[{"type": "function"}]), "invalid_params", "row 1: unknown key 'tools'"),
     (request("b", n=3), "invalid_params", "row 1: unknown key 'n'"),
     (request("b", temperature="hot"), "invalid_params", "row 1: temperature should be a number, not 'hot'"),
     (request("b", url="/v1/embeddings"), "template_error", "url '/v1/embeddings' is not served, only"),
     (request("b", messages=[]), "empty_prompt", "the body has no messages"),
     ({"custom_id": "b", "url": "/v1/chat/completions"}, "empty_prompt", "the body has no messages"),
     (request("b", messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "template_error", "not text"),
     (request("b", messages=[{"content": "x"}]), "template_error", "message 0: 'role' should be text")],
)  # fmt: skip
def test_a_request_that_cannot_run_is_a_row_with_an_error(planned, write, wrong, kind, message):
    first, second = planned(write(request("a"), wrong))
    assert first == ("user:Hello a|", None)
    assert second[0]["type"] == kind
    assert message in second[0]["message"]


def test_a_response_format_becomes_the_rows_schema(planned, write):
    schema = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
    formats = (
        {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}},
        {"type": "json_object"},
        {"type": "text"},
        {"type": "json_schema", "json_schema": {"schema": {"not": {}}}},
    )
    path = write(*(request(str(at), response_format=each) for at, each in enumerate(formats)))
    *good, bad = planned(path)
    assert [params and json.loads(params) for _, params in good] == [
        {"json_schema": json.dumps(schema, separators=(",", ":"))}, {"json_schema": '{"type":"object"}'}, None
    ]  # fmt: skip
    assert bad[0]["type"] == "schema_unsupported"


def test_names_must_be_there_and_unique(planned, write):
    with pytest.raises(DataError, match="rows 0 and 1 have the same id 'a' in column 'custom_id'"):
        planned(write(request("a"), request("a")))
    with pytest.raises(DataError, match="row 1 has no id in column 'custom_id'"):
        planned(write(request("a"), request(None)))


def test_a_line_that_is_no_request_is_named(write):
    path = write(request("a"))
    path.write_text(path.read_text() + "[1]\n")
    with pytest.raises(DataError, match="line 3: a request should be an object, not list"):
        list(scan(expand([str(path)])))
    path.write_text(path.read_text().replace("[1]", "{"))
    with pytest.raises(DataError, match="line 3: not JSON"):
        list(scan(expand([str(path)])))


def test_other_json_lines_stay_what_they_were_and_files_are_told_by_their_first_line(write):
    batch, other = write(request("a")), write({"prompt": "x", "custom_id": "a"}, name="other.jsonl")
    assert expand([str(batch)]).schema == SCHEMA
    assert expand([str(other)]).schema.names == ["prompt", "custom_id"]
    assert expand([str(batch), str(other)]).format == "JSON Lines"


def test_a_model_without_a_chat_template_is_refused(planned, write):
    with pytest.raises(UsageError, match="messages of batch requests need a chat template"):
        planned(write(request("a")), EchoTokenizer())
