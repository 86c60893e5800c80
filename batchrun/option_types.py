"""What the values of options may be written as: a duration, a rate, a list with commas, a schema, pairs, workers.

Each type takes what comes from a command line, a TOML file or Python and is the value that the job keeps.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import time, timedelta
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationError

from batchrun.engine.request import EarlyStoppingName

_DURATION = TypeAdapter(timedelta)
_WORKFORCES = re.compile(r"(\d+(?:,\d+)*|\d+\.\.\d+)(?:[x\u00d7](.+))?")


@dataclass(frozen=True, slots=True)
class Workforces:
    """Numbers of workers, ascending, and what each runs on; None: what this process would run on."""

    workers: tuple[int, ...]
    device: str | None = None


def _seconds(value: object) -> object:
    """90, "90", "90s", "1h30m" → seconds: an ISO 8601 duration without its "PT"."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    try:
        return float(text)
    except ValueError:
        pass
    try:
        return _DURATION.validate_python("PT" + text.upper()).total_seconds()
    except ValidationError:
        raise ValueError("should be a duration such as 90s, 15m or 2h") from None


def _deadline(value: object) -> object:
    """ "3h" → seconds; "06:00" → a time of day."""
    if isinstance(value, time):
        return value
    try:
        if isinstance(value, str) and ":" in value:
            return time.fromisoformat(value.strip())
        seconds = _seconds(value)
    except ValueError:
        seconds = None
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or seconds <= 0:
        raise ValueError("should be a duration such as 3h, or a time of day such as 06:00")
    return float(seconds)


def _rate(value: object) -> object:
    """0.01, "0.01", "1%" → a share of 1."""
    if isinstance(value, str) and value.strip().endswith("%"):
        try:
            return float(value.strip().removesuffix("%")) / 100
        except ValueError:
            raise ValueError("should be a rate such as 1% or 0.01") from None
    return value


def _one_or_more(value: object) -> object:
    return (value,) if isinstance(value, str | int) else value


def _name_of_truth(value: object) -> object:
    """True and False, as Python and TOML have them, → their names."""
    return str(value).lower() if isinstance(value, bool | str) else value


def _none_if_empty(value: object) -> object:
    return None if value in ("", ()) else value


def _json_schema(value: object) -> object:
    """A schema as compact JSON text, its keys in their order, which is that of the answer's."""
    if value in (None, ""):
        return None
    try:
        schema = json.loads(value) if isinstance(value, str) else value
        if isinstance(schema, Mapping | bool):
            return json.dumps(schema, separators=(",", ":"))
    except (ValueError, TypeError, RecursionError):
        pass
    raise ValueError("should be a JSON schema, an object")


def _workforces(value: object) -> object:
    """ "8", "1,2,4", "1..64" (which doubles), each with "xDEVICE" behind it or not → `Workforces`."""
    if value is None or isinstance(value, Workforces):
        return value
    found = _WORKFORCES.fullmatch(str(value).strip())
    numbers = _numbers(found[1]) if found else ()
    if found is None or not numbers or numbers[0] < 1:
        raise ValueError("should be numbers of workers such as 8, 1,2,4 or 1..64, or with a device 8xh100-80gb")
    return Workforces(numbers, found[2])


def _numbers(text: str) -> tuple[int, ...]:
    """Each once and ascending; of "1..64" 1, 2, 4 and so on, and the last."""
    first, dots, last = text.partition("..")
    if not dots:
        return tuple(sorted({int(number) for number in text.split(",")}))
    number, end = int(first), int(last)
    doubled = []
    while 0 < number < end:
        doubled.append(number)
        number *= 2
    return (*doubled, end) if 0 < int(first) <= end else ()


def _comma_separated(value: object) -> object:
    parts = _one_or_more(value)
    if not isinstance(parts, tuple | list):
        return parts
    return tuple(piece for part in parts for piece in (part.split(",") if isinstance(part, str) else (part,)))


def _biases(value: object) -> object:
    """{"198": -5}, JSON of it, pairs of the two, or texts "198=-5" → pairs of token and bias."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = _parsed(value)
    pairs = list(value.items()) if isinstance(value, Mapping) else _one_or_more(value)
    if not isinstance(pairs, tuple | list):
        return value
    split = [tuple(each.split("=", 1)) if isinstance(each, str) else each for each in pairs]
    if not all(isinstance(each, tuple | list) and len(each) == 2 for each in split):
        raise ValueError("should be pairs of a token id and a bias such as 198=-5")
    return tuple(split)


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("should be JSON, an object of token ids with a bias each") from None


def _by_token(pairs: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
    return tuple(sorted(dict(pairs).items()))


Seconds = Annotated[float, BeforeValidator(_seconds)]
Deadline = Annotated[float | time, BeforeValidator(_deadline)]
Rate = Annotated[float, BeforeValidator(_rate)]
Texts = Annotated[tuple[str, ...], BeforeValidator(_one_or_more)]
Names = Annotated[tuple[str, ...], BeforeValidator(_comma_separated)]
WorkforcesText = Annotated[Workforces | None, BeforeValidator(_workforces)]
TaskName = Literal["generate", "score", "choose", "embed"]
DeviceName = Literal["auto", "cpu", "cuda"]
ChoiceNormalise = Literal["none", "tokens", "bytes"]
NonemptyText = Annotated[str | None, BeforeValidator(_none_if_empty)]
JsonSchema = Annotated[str | None, BeforeValidator(_json_schema)]
EarlyStopping = Annotated[EarlyStoppingName, BeforeValidator(_name_of_truth)]
PrefixCaching = Literal["auto", "on", "off"]
TokenId = Annotated[int, Field(ge=0)]
Bias = Annotated[float, Field(ge=-100, le=100)]
LogitBias = Annotated[tuple[tuple[TokenId, Bias], ...], BeforeValidator(_biases), AfterValidator(_by_token)]
TokenIdList = Annotated[tuple[int, ...], BeforeValidator(_comma_separated)]
