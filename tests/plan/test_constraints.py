"""Constraints in options and cells: what is taken, what takes whose place, and what is refused before anything runs."""

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from batchrun.checkpoint import cache_folder, resolve
from batchrun.engine.grammar import Constraint
from batchrun.engine.request import SamplingParams
from batchrun.errors import DataError, UsageError
from batchrun.grammars import ConstraintUnsupported, Grammars
from batchrun.job import Job
from batchrun.plan.params import ParamsReader, merged
from batchrun.plan.prompt import PromptRenderer, Rendered
from batchrun.tokenizer import EchoTokenizer

SCHEMA = '{"type":"object","properties":{"b":{"type":"integer"},"a":{"type":"string"}}}'
FREE_LAYOUT = ',"x-guidance":{"whitespace_flexible":true,"item_separator":",","key_separator":":"}}'
SPEC = resolve("echo", revision=None, cache=cache_folder(), trust_remote_code=False).spec


def job(**options: Any) -> Job:
    return Job.load({"inputs": ("in.parquet",), "output": "out", "model": "echo", **options})


def test_a_schema_is_a_file_a_text_or_an_object_and_keeps_its_order(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(json.loads(SCHEMA), indent=2))
    given = (str(file), file, SCHEMA, " " + SCHEMA, json.loads(SCHEMA))
    assert {job(json_schema=one).sampling.constraint for one in given} == {Constraint("json_schema", SCHEMA)}


def test_a_grammar_is_a_file_or_a_text(tmp_path: Path) -> None:
    (tmp_path / "g.lark").write_text('start: "a"')
    assert {job(grammar=one).grammar for one in (str(tmp_path / "g.lark"), 'start: "a"')} == {'start: "a"'}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"json_schema": "nowhere.json"}, "--json-schema: 'nowhere.json' is neither a readable file nor a JSON schema"),
        ({"json_schema": "{"}, "--json-schema should be a JSON schema, an object, not"),
        ({"json_schema": [1]}, "--json-schema should be a JSON schema, an object, not"),
        ({"grammar": "nowhere.lark"}, "--grammar: 'nowhere.lark' is neither a readable file nor a grammar"),
        ({"regex": "a", "guided_choice": "b"}, "--regex and --guided-choice exclude each other"),
        ({"json_schema": SCHEMA, "grammar": 'start: "a"'}, "--json-schema and --grammar exclude each other"),
        ({"regex": "a", "ignore_eos": True}, "--ignore-eos cannot go with --regex"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        job(**options)


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ({"regex": "a+"}, Constraint("regex", "a+")),
        ({"guided_choice": ["x", "y"]}, Constraint("guided_choice", '["x", "y"]')),
        ({"json_schema": json.loads(SCHEMA)}, Constraint("json_schema", SCHEMA)),
        ({"max_tokens": 5}, Constraint("json_schema", '{"type":"integer"}')),
        ({"json_schema": ""}, None),
        ({"guided_choice": []}, None),
    ],
)
def test_a_rows_constraint_takes_the_place_of_the_jobs(cell: dict[str, Any], expected: Constraint | None) -> None:
    base = SamplingParams(json_schema='{"type":"integer"}')
    assert merged(base, ParamsReader(base).overrides(cell)).constraint == expected
    # And what a retry says takes the place of both.
    always = {"grammar": 'start: "a"'}
    assert merged(base, ParamsReader(base, always).overrides(cell)).constraint == Constraint("grammar", 'start: "a"')


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"json_schema": '{"propertis":{}}'}, "'propertis' is no keyword of a schema; did you mean 'properties'"),
        ({"json_schema": '{"type":"array","uniqueItems":true}'}, r'--json-schema .*Unimplemented keys: .*"uniq'),
        ({"json_schema": '{"not":{},"x-guidance":{"lenient":true}}'}, '--json-schema .*Unimplemented keys: .*"not"'),
        ({"json_schema": '{"$ref":"https://example.com/x.json"}'}, "--json-schema .*Default retriever does not fetch"),
        ({"json_schema": '{"type":"string","format":"roman"}'}, "--json-schema .*Unknown format: roman"),
        ({"regex": "a(?=b)"}, "--regex .*look-around"),
        ({"regex": r"(a)\1"}, "--regex .*backreferences are not supported"),
        ({"grammar": "start: other"}, '--grammar .*unknown name: "other"'),
        ({"grammar": "begin: /a/"}, "--grammar .*no start rule"),
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_for_all_rows_is_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(DataError, match=named):
        renderer(job(prompt_col="t", **options))
    with pytest.raises(DataError, match=named):
        renderer(job(prompt_col="t"), always=options)


def renderer(asked: Job, **options: Any) -> PromptRenderer:
    schema = pa.schema([("t", pa.string()), ("p", pa.string())])
    return PromptRenderer(asked, EchoTokenizer(), SPEC, schema, **options)


def rendered(asked: Job, cells: list[dict[str, Any] | None]) -> Rendered:
    rows = {
        "row_idx": list(range(len(cells))),
        "t": ["x"] * len(cells),
        "p": [cell and json.dumps(cell) for cell in cells],
    }
    return renderer(asked).render(pa.RecordBatch.from_pydict(rows))


def test_what_cannot_be_enforced_for_one_row_fails_that_row() -> None:
    cells: list[dict[str, Any] | None] = [
        None, {"regex": "("}, {"json_schema": {"not": {}}}, {"regex": "a", "guided_choice": ["b"]}, {"regex": "a"},
        {"regex": "a", "ignore_eos": True},
    ]  # fmt: skip
    errors = rendered(job(prompt_col="t", params_col="p", regex="b"), cells).errors
    assert [error and error.type for error in errors] == [
        None, "schema_unsupported", "schema_unsupported", "invalid_params", None, "invalid_params"
    ]  # fmt: skip
    assert errors[2] is not None
    assert errors[2].message == (
        "row 2: column 'p': json_schema cannot be enforced: Unimplemented keys: [\"not\"]; correct it, or null for the "
        "job's"
    )


def test_without_the_extra_the_job_is_refused_and_not_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UsageError, match=r"pip install 'batchrun\[structured\]'"):
        renderer(job(prompt_col="t", regex="a"))
    with pytest.raises(UsageError, match=r"pip install 'batchrun\[structured\]'"):
        rendered(job(prompt_col="t", params_col="p"), [{"regex": "a"}])
    assert rendered(job(prompt_col="t", params_col="p"), [{"max_tokens": 3}]).errors == [None]


def test_each_constraint_is_compiled_once() -> None:
    grammars = Grammars(EchoTokenizer(), SPEC)
    first = grammars.compile(Constraint("regex", "a+"))
    assert grammars.compile(Constraint("regex", "a+")) is first
    assert grammars.compile(Constraint("regex", "b+")) is not first


@pytest.mark.parametrize(
    ("constraint", "good", "bad"),
    [
        (Constraint("regex", r"\d{3}"), "123", "12"),
        (Constraint("regex", r"\d{3}"), "123", "1\u0665\u0666"),
        (Constraint("guided_choice", '["a\\"b", "\\u00e9"]'), "é", "e"),
        (Constraint("json_schema", SCHEMA), '{"b": 1, "a": "é"}', '{"b": 1, "a": "é"'),
        (Constraint("json_schema", SCHEMA), '{"b": 1}', '{"b":1}'),
        (Constraint("json_schema", SCHEMA[:-1] + FREE_LAYOUT), '{"b":\n1}', '{"b":\n}'),
        (Constraint("grammar", 'start: "a" x\nx: /[0-9]/'), "a7", "a"),
    ],
)  # fmt: skip
def test_a_grammar_describes_whole_texts(constraint: Constraint, good: str, bad: str) -> None:
    grammar = Grammars(EchoTokenizer(), SPEC).compile(constraint)
    assert grammar.describes(good)
    assert not grammar.describes(bad)
    assert grammar.describes([*EchoTokenizer().encode([good], add_special_tokens=False)[0].tolist(), 2])


def test_an_unsupported_constraint_is_an_error_of_a_value() -> None:
    with pytest.raises(ConstraintUnsupported, match="regex cannot be enforced"):
        Grammars(EchoTokenizer(), SPEC).compile(Constraint("regex", "("))
