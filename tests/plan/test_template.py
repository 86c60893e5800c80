"""Prompts from a Jinja2 template over a row's columns."""

from typing import Any

import pyarrow as pa
import pytest

from batchrun.errors import DataError, RowError
from batchrun.plan.template import TemplatePrompt


def batch(**columns: Any) -> pa.RecordBatch:
    num_rows = len(next(iter(columns.values())))
    return pa.record_batch({"row_idx": pa.array(range(5, 5 + num_rows)), **columns})


def render(text: str, rows: pa.RecordBatch) -> list[str | RowError]:
    schema = pa.schema(list(rows.schema)[1:])
    template = TemplatePrompt(text, schema)
    return template.read(rows.select(["row_idx", *template.columns]))


def message(text: str, rows: pa.RecordBatch) -> str:
    (outcome,) = render(text, rows)
    assert isinstance(outcome, RowError)
    assert outcome.type == "template_error"
    return outcome.message


def test_columns_fill_the_template() -> None:
    rows = batch(body=["a", "<b>"], tags=[["x", "y"], []], unused=[1, 2])
    text = "{% if tags %}{{ tags | join(',') }}: {% endif %}{{ body }}\n"
    assert render(text, rows) == ["x,y: a", "<b>"]
    schema = pa.schema(list(rows.schema)[1:])
    assert TemplatePrompt(text, schema).columns == ("body", "tags")


def test_prompt_is_the_column_that_the_job_names() -> None:
    rows = batch(prompt=["not this"], review=["this"], tags=["x"])
    schema = pa.schema(list(rows.schema)[1:])
    template = TemplatePrompt("{{ tags }}: {{ prompt }} {{ row.prompt }}", schema, prompt_col="review")
    assert template.read(rows) == ["x: this not this"]
    assert TemplatePrompt("{{ prompt }}", schema, prompt_col="review").columns == ("review",)
    assert TemplatePrompt("{{ prompt }}", schema).columns == ("prompt",)


def test_a_template_that_has_no_use_for_the_prompt_column_is_refused() -> None:
    with pytest.raises(DataError, match="does not use column 'b', which it would call prompt"):
        TemplatePrompt("{{ a }}", batch(a=["x"], b=["y"]).schema, prompt_col="b")
    with pytest.raises(DataError, match="--prompt-col: the input has no column 'c'; it has: row_idx, a"):
        TemplatePrompt("{{ prompt }}", batch(a=["x"]).schema, prompt_col="c")


def test_options_of_the_job_are_named_unless_empty_or_a_column_has_the_name() -> None:
    rows = batch(a=["x"], json_schema=["mine"])
    options = {"choice": ("yes", "no"), "json_schema": "{}"}
    template = TemplatePrompt("{{ choice | join('/') }} {{ json_schema }} {{ a }}", rows.schema, options=options)
    assert template.read(rows) == ["yes/no mine x"]
    with pytest.raises(DataError, match="--template: the input has no column 'choice'"):
        TemplatePrompt("{{ choice }}", rows.schema, options={"choice": ()})


def test_row_names_columns_that_are_no_identifiers() -> None:
    assert render("{{ row['unit price'] }}", batch(**{"unit price": [3]})) == ["3"]
    assert render("{{ row }}", batch(row=["mine"])) == ["mine"]


def test_json_is_not_escaped_for_html() -> None:
    assert render("{{ t | tojson }}", batch(t=["<é's>"])) == ['"<é\'s>"']


def test_printing_a_null_is_an_error_and_testing_one_is_not() -> None:
    rows = batch(body=pa.array([None], pa.string()))
    assert message("x{{ body }}", rows) == (
        "row 5: the template prints a null (null here: 'body'); write {{ body or '' }}"
    )
    assert render("x{{ body or '-' }}{% if body is none %}!{% endif %}", rows) == ["x-!"]


def test_failing_expression_is_that_rows_error() -> None:
    good, bad = render("{{ 6 // n }}", batch(n=[2, 0]))
    assert good == "3"
    assert isinstance(bad, RowError)
    assert bad.type == "template_error"
    assert bad.message.startswith("row 6: the template fails on it: ZeroDivisionError")


def test_missing_attribute_and_unsafe_access_are_errors() -> None:
    rows = batch(s=[{"a": 1}])
    assert "has no attribute 'b'" in message("{{ s.b }}", rows)
    assert "SecurityError" in message("{{ s.__class__.__mro__ }}", rows)


def test_template_that_renders_to_nothing_has_no_prompt() -> None:
    (outcome,) = render("{% if n > 3 %}x{% endif %}", batch(n=[1]))
    assert isinstance(outcome, RowError)
    assert outcome.type == "empty_prompt"


def test_unknown_column_is_refused_unless_the_template_asks_for_it() -> None:
    rows = batch(body=["a"])
    with pytest.raises(DataError, match=r"--template: the input has no column 'bod'; did you mean 'body'\?"):
        render("{{ bod }}", rows)
    assert render("{{ title | default('none') }}{% if x is defined %}{{ x }}{% endif %}", rows) == ["none"]
    assert render("{% for i in range(2) %}{{ loop.index }}{{ body }}{% endfor %}", rows) == ["1a2a"]


def test_syntax_error_names_the_line() -> None:
    with pytest.raises(DataError, match="--template, line 2: "):
        render("a\n{{ body ", batch(body=["a"]))


def test_unreadable_cell_is_that_rows_error() -> None:
    raw = pa.array([b"ok", b"\xff"], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 2, raw.buffers())
    assert render("{{ t }}!", batch(t=text)) == [
        "ok!",
        RowError("invalid_utf8", "row 6: column 't' is not UTF-8 (byte 0xff at offset 0); re-encode it"),
    ]
