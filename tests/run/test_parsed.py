"""The type of `parsed` is a schema's own where it has one, and holds every value or says so."""

import json
from typing import Any

import pyarrow as pa
import pytest

from batchrun.tasks.parsed import parsed, parsed_type

TEXT, INT = {"type": "string"}, {"type": "integer"}


def closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        (closed(a=TEXT, b=INT), pa.struct([("a", pa.string()), ("b", pa.int64())])),
        (closed(b=INT, a={"enum": ["x", None]}), pa.struct([("b", pa.int64()), ("a", pa.string())])),
        (closed(a={"type": ["number", "null"]}), pa.struct([("a", pa.float64())])),
        (closed(a={"anyOf": [INT, {"type": "null"}]}), pa.struct([("a", pa.int64())])),
        (closed(a={"$ref": "#/$defs/b"}) | {"$defs": {"b": closed(c=TEXT)}},
         pa.struct([("a", pa.struct([("c", pa.string())]))])),
        ({"type": "array", "items": closed(a={"const": True})}, pa.list_(pa.struct([("a", pa.bool_())]))),
        # Not closed, of two types, recursive, empty, by place: text.
        ({"type": "object", "properties": {"a": TEXT}}, pa.string()),
        (closed(a={"anyOf": [TEXT, INT]}), pa.string()),
        (closed(a={"enum": ["x", 1]}), pa.string()),
        (closed(a={"oneOf": [TEXT, INT]}), pa.string()),
        (closed(a={"$ref": "#/$defs/b"}) | {"$defs": {"b": closed(c={"$ref": "#/$defs/b"})}}, pa.string()),
        (closed(), pa.string()),
        (closed(a={}), pa.string()),
        ({"type": "array", "prefixItems": [TEXT], "items": INT}, pa.string()),
        (True, pa.string()),
        # Whoever compiles it says what is wrong with it.
        (closed(a={"anyOf": [True, TEXT]}), pa.string()),
        (closed(a={"anyOf": 3}), pa.string()),
        (closed(a={"enum": 3}), pa.string()),
        ({"type": "object", "properties": ["a"], "additionalProperties": False}, pa.string()),
    ],
)  # fmt: skip
def test_a_schema_has_a_type_where_one_is_exact(schema: object, kind: pa.DataType) -> None:
    assert parsed_type(json.dumps(schema)) == kind


@pytest.mark.parametrize("text", ['{"a": 9223372036854775808, "b": 1.5}', '{"a": 1, "b": 1e999}'])
def test_a_number_without_room_is_an_error(text: str) -> None:
    kind = pa.struct([("a", pa.int64()), ("b", pa.float64())])
    assert parsed('{"a": 9223372036854775807, "b": 2}', kind) == {"a": 9223372036854775807, "b": 2}
    with pytest.raises(ValueError, match="a number does not fit the column's type"):
        parsed(text, kind)


def test_text_stays_as_it_was_written() -> None:
    assert parsed('{"a": 1.50}', pa.string()) == '{"a": 1.50}'
