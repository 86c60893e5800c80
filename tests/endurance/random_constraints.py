"""Random JSON schemas and regular expressions, by seed, and what says whether a text follows them: not our library."""

import json
import random
import re
from typing import Any

from jsonschema import Draft202012Validator

_WORDS = ("red", "green", "name", "total", "city", "on hold", "x-1", "done", "née", 'a "b"')
_PATTERNS = ("^[A-Z][a-z]{1,8}$", "^[0-9]{3}-[0-9]{2}$", "^(low|high)[ab]?$", "^\\d{1,4}$", "^[^ ]{2,6}$")
_FORMATS = ("date", "time", "uuid", "ipv4", "email")
_ATOMS = ("a", "b", "q", "7", " ", "[a-c]", "[A-Z0-9]", "[^x]", "\\d", "\\w", "é", "\\.", "(?:ab|ba)")
_COUNTS = ("", "", "", "?", "{2}", "{1,3}", "{2,5}", "+", "*")


def random_schema(rng: random.Random) -> dict[str, Any]:
    """An object mostly; every kind of schema within it."""
    kind = _object if rng.random() < 0.8 else _any
    schema = kind(rng, 3)
    if rng.random() < 0.1:
        return {"$defs": {"part": schema}, "type": "array", "items": {"$ref": "#/$defs/part"}, "maxItems": 2}
    return schema


def random_regex(rng: random.Random, depth: int = 2) -> str:
    """One that Python and Rust read alike."""
    pieces = []
    for _ in range(rng.randint(1, 4)):
        if depth and rng.random() < 0.3:
            options = "|".join(random_regex(rng, depth - 1) for _ in range(rng.randint(1, 3)))
            pieces.append(f"({options}){rng.choice(('', '', '?', '{1,2}'))}")
        else:
            pieces.append(rng.choice(_ATOMS) + rng.choice(_COUNTS))
    return "".join(pieces)


def follows_schema(schema: dict[str, Any], text: str) -> bool:
    """Whether the text is JSON, strictly, and of the schema."""
    try:
        return bool(Draft202012Validator(schema).is_valid(json.loads(text, parse_constant=_refuse)))
    except ValueError:
        return False


def follows_regex(regex: str, text: str) -> bool:
    """Whether the whole text matches."""
    return re.fullmatch(regex, text) is not None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _any(rng: random.Random, depth: int) -> dict[str, Any]:
    leaves = (_string, _string, _integer, _number, _enum, _boolean)
    return rng.choice((*leaves, _object, _object, _array, _any_of) if depth else leaves)(rng, depth - 1)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(_WORDS, rng.randint(1, 4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: _any(rng, max(depth - 1, 0)) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": rng.random() < 0.1 and _integer(rng, 0),
    }
    return schema


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 2)
    limits = {"minItems": least, "maxItems": least + rng.randint(1, 3)}
    if rng.random() < 0.2:
        first = [_any(rng, max(depth - 1, 0)) for _ in range(2)]
        return {"type": "array", "prefixItems": first, "items": False, "minItems": 2}
    return {"type": "array", "items": _any(rng, max(depth - 1, 0)), **limits}


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_any(rng, max(depth - 1, 0)) for _ in range(rng.randint(2, 3))]}


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 4)
    return rng.choice(
        (
            {"type": "string", "pattern": rng.choice(_PATTERNS)},
            {"type": "string", "format": rng.choice(_FORMATS)},
            {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 12)},
            {"type": "string", "maxLength": rng.randint(1, 20)},
            {"type": ["string", "null"], "maxLength": 8},
        )
    )


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(-500, 500)
    limits = {"minimum": least, "maximum": least + rng.randint(0, 10_000)}
    return rng.choice(
        (
            {"type": "integer", **limits},
            {"type": "integer", "minimum": 0, "exclusiveMaximum": rng.randint(1, 99)},
            {"type": "integer", "multipleOf": rng.randint(2, 9), "minimum": 0, "maximum": 1000},
        )
    )


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    least = round(rng.uniform(-50, 50), 2)
    return {"type": "number", "minimum": least, "maximum": round(least + rng.uniform(0, 90), 1)}


def _enum(rng: random.Random, depth: int) -> dict[str, Any]:
    values = [*rng.sample(_WORDS, 3), rng.randint(0, 9), None, True]
    return {"const": values[0]} if rng.random() < 0.2 else {"enum": rng.sample(values, rng.randint(1, 5))}


def _boolean(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "boolean"}
