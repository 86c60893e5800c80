"""Keywords of a JSON schema that are none: a misspelt one would be ignored, and the answers would not be as was meant.

Words that are like none of JSON Schema's stay what the standard calls annotations: anybody may put them there.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from batchrun.nearest import nearest

# JSON Schema 2020-12 and, of the drafts before it, what has another name there.
_OF_SCHEMAS = frozenset(
    {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions", "dependencies"}
)  # their keys are names, and their values schemas
_WITH_SCHEMAS = frozenset(
    {
        "additionalItems", "additionalProperties", "allOf", "anyOf", "contains", "contentSchema", "else", "if", "items",
        "not", "oneOf", "prefixItems", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
    }
)  # fmt: skip
_WITH_VALUES = frozenset(
    {
        "$dynamicRef", "$recursiveRef", "$ref", "const", "dependentRequired", "enum", "exclusiveMaximum",
        "exclusiveMinimum", "format", "maxContains", "maxItems", "maxLength", "maxProperties", "maximum", "minContains",
        "minItems", "minLength", "minProperties", "minimum", "multipleOf", "nullable", "pattern", "required", "type",
        "uniqueItems",
    }
)  # fmt: skip
_BINDING = _OF_SCHEMAS | _WITH_SCHEMAS | _WITH_VALUES
_OTHERS = frozenset({"contentEncoding", "contentMediaType"})  # like some of these, and right
_SIMILARITY = 0.88


def misspelt(schema_text: str) -> tuple[str, str] | None:
    """The first word that stands where a keyword may and is almost one that binds, and that one; None: there is none.

    What references point into is no misspelling.
    """
    for word in _words(json.loads(schema_text)):
        if word in _BINDING | _OTHERS or f'"#/{word}/' in schema_text:
            continue
        if (meant := _meant(word)) is not None:
            return word, meant
    return None


def _meant(word: str) -> str | None:
    """The keyword that the word was to be; a longer or shorter word is another one."""
    plain = {keyword.lower(): keyword for keyword in _BINDING}
    if (same := plain.get(re.sub("[-_]", "", word.lower()))) is not None:
        return same
    meant = nearest(word, sorted(_BINDING), _SIMILARITY)
    return None if meant is None or meant.startswith(word) or word.startswith(meant) else meant


def _words(schema: Any) -> Iterator[str]:
    """What stands where keywords may, in the schema and those in it."""
    if isinstance(schema, list):
        for one in schema:
            yield from _words(one)
    if not isinstance(schema, dict):
        return
    for word, value in schema.items():
        yield word
        if word in _OF_SCHEMAS and isinstance(value, dict):
            yield from _words(list(value.values()))
        elif word in _WITH_SCHEMAS:
            yield from _words(value)
