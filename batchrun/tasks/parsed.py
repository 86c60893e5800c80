"""The column `parsed`: what a text says under a JSON schema, in the Arrow type that the schema describes, if one does.

A type must hold every value of the schema and nothing must be lost in it; otherwise the column is the JSON text.
"""

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

_PLAIN = {"string": pa.string(), "integer": pa.int64(), "number": pa.float64(), "boolean": pa.bool_()}
_JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number"}
_DEFINITIONS = "#/$defs/"


def parsed_type(json_schema: str) -> pa.DataType:
    """Structs of the schema's closed objects, lists, and plain types, each of them nullable; or text."""
    schema = json.loads(json_schema)
    definitions = schema.get("$defs", {}) if isinstance(schema, dict) else {}
    return _type(schema, definitions, frozenset()) or pa.string()


def parsed(text: str, kind: pa.DataType) -> Any:
    """What to put into a column of this type for a text that follows the schema.

    Raises ValueError for a number that the type has no room for.
    """
    if kind == pa.string():
        return text
    try:
        value = json.loads(text, parse_float=_finite)
        pa.scalar(value, kind)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"a number does not fit the column's type: {error}") from None
    return value


def _finite(digits: str) -> float:
    if not math.isfinite(float(digits)):
        raise ValueError(digits)
    return float(digits)


def _type(schema: Any, definitions: Mapping[str, Any], within: frozenset[str]) -> pa.DataType | None:
    """None where no type is exact; `within` are the definitions that are being looked at."""
    if not isinstance(schema, dict):
        return None
    if "$ref" in schema:
        name = str(schema["$ref"]).removeprefix(_DEFINITIONS)
        is_known = name in definitions and name not in within
        return _type(definitions[name], definitions, within | {name}) if is_known else None
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return _type_of_values(values) if isinstance(values, list) else None
    kinds = schema.get("type")
    options = [{**schema, "type": kind} for kind in kinds] if isinstance(kinds, list) else schema.get("anyOf", [schema])
    if not isinstance(options, list) or not all(isinstance(option, dict) for option in options):
        return None
    options = [option for option in options if option.get("type") != "null"]
    if len(options) != 1 or "oneOf" in schema or "allOf" in schema:
        return None
    if "anyOf" in schema:
        return _type(options[0], definitions, within)
    kind = options[0].get("type")
    if kind == "array":
        item = None if "prefixItems" in schema else _type(schema.get("items"), definitions, within)
        return None if item is None else pa.list_(item)
    return _struct(schema, definitions, within) if kind == "object" else _PLAIN.get(str(kind))


def _type_of_values(values: Iterable[Any]) -> pa.DataType | None:
    kinds = {_JSON_TYPES.get(type(value)) for value in values if value is not None}
    kind = kinds.pop() if len(kinds) == 1 else None
    return None if kind is None else _PLAIN[kind]


def _struct(schema: dict[str, Any], definitions: Mapping[str, Any], within: frozenset[str]) -> pa.DataType | None:
    properties = schema.get("properties")
    if (
        not properties
        or not isinstance(properties, dict)
        or schema.get("additionalProperties") is not False
        or schema.get("patternProperties")
    ):
        return None
    types = {name: _type(each, definitions, within) for name, each in properties.items()}
    return None if None in types.values() else pa.struct(list(types.items()))
