"""A misspelt keyword is found wherever schemas are, and nothing else is taken for one."""

import json
from typing import Any

import pytest
from jsonschema import Draft4Validator, Draft6Validator, Draft7Validator

from batchrun.schema_keywords import misspelt

WRONG = {"patternPropertis": {"^a": {}}}


@pytest.mark.parametrize(
    "schema",
    [
        WRONG,
        {"properties": {"a": WRONG}},
        {"items": WRONG},
        {"anyOf": [{"type": "null"}, WRONG]},
        {"$defs": {"a": WRONG}, "additionalProperties": {"not": WRONG}},
    ],
)
def test_a_misspelt_keyword_is_found_wherever_schemas_are(schema: object) -> None:
    assert misspelt(json.dumps(schema)) == ("patternPropertis", "patternProperties")


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"type": "object", "properties": {"patternPropertis": {"type": "string"}, "requird": {}}},
        {"enum": [WRONG], "const": WRONG, "default": WRONG, "examples": [WRONG]},
        {"x-order": 3, "ui:widget": "text", "comment": "said by nobody", "markdownDescription": "..."},
        {
            "note": "",
            "definition": "",
            "item": "",
            "multiple": 2,
            "formats": [],
            "patterns": [],
            "types": [],
        },
        {"defs": {"a": {"type": "null"}}, "$ref": "#/defs/a"},
    ],
)
def test_names_values_and_annotations_are_left_alone(schema: object) -> None:
    assert misspelt(json.dumps(schema)) is None


@pytest.mark.parametrize("draft", [Draft4Validator, Draft6Validator, Draft7Validator])
def test_every_keyword_of_the_standard_is_one(draft: Any) -> None:
    assert misspelt(json.dumps(dict.fromkeys(draft.META_SCHEMA["properties"], True))) is None
