"""Where an option's value comes from: flag, `BATCHRUN_…` variable, TOML file, in that order of precedence.

Knows how options are declared, merged and named in messages, but not what they mean: that is `job`'s.
"""

import os
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from batchrun.errors import InputMissing, UsageError
from batchrun.nearest import nearest

ENV_PREFIX = "BATCHRUN_"
# Kubernetes puts variables such as BATCHRUN_SERVICE_HOST into every pod beside a service called batchrun; so only
# a variable that looks like a misspelt option is an error.
_ENV_TYPO_SIMILARITY = 0.8
_PLAIN_REASONS = {
    "byte_size": "should be a size such as 4GiB or 512MiB",
    "byte_size_unit": "should be a size such as 4GiB or 512MiB",
    "int_parsing": "should be a whole number",
    "int_from_float": "should be a whole number",
    "int_type": "should be a whole number",
    "float_parsing": "should be a number",
    "float_type": "should be a number",
    "bool_parsing": "should be true or false",
    "bool_type": "should be true or false",
}

Model = TypeVar("Model")


@dataclass(frozen=True, slots=True)
class Setting:
    """A value as it was given, how to name it in a message, and the folder its relative paths start from."""

    value: object
    label: str
    base: Path


def merge(
    known: Collection[str], options: Mapping[str, object], env: Mapping[str, str], file: Path | None
) -> dict[str, Setting]:
    """The given settings by option name. A None among `options`, and an empty variable, count as not given.

    Raises:
        UsageError: a name that is no option (the message proposes the nearest), or a file that is not TOML.
        InputMissing: `file` does not exist.
    """
    return _from_file(known, file) | _from_env(known, env) | _from_options(known, options)


def from_toml(text: str, known: Collection[str], where: str, base: Path) -> dict[str, Setting]:
    """The settings of a file's text, a flat table; `where` names it, relative paths start from `base`.

    Raises:
        UsageError: it is not TOML, or a key is no option (the message proposes the nearest).
    """
    try:
        table = {key.replace("-", "_"): value for key, value in tomllib.loads(text).items()}
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{where} is not TOML: {error}") from error
    _refuse_unknown(known, table, where=f" in {where}")
    return {name: Setting(value, f"{name} in {where}", base) for name, value in table.items()}


def option(group: str, default: Any, help: str, metavar: str | None = None, **limits: Any) -> Any:
    """A field that is also a command line option; `group` is its section in `--help`."""
    return Field(default, description=help, json_schema_extra={"group": group, "metavar": metavar}, **limits)


def validated(model: type[Model], values: Mapping[str, object], given: Mapping[str, Setting]) -> Model:
    """`model`, a pydantic class, made of `values`; `given` says how the user named each.

    Raises:
        UsageError: the first value that does not fit, in one line.
    """
    try:
        return TypeAdapter(model).validate_python(values)
    except ValidationError as error:
        raise UsageError(_one_line(error, given)) from error


def plain_reason(error: ErrorDetails) -> str:
    """What is wrong with a value, to be read after its name: "should be a whole number, not 'eight'"."""
    reason = str(error["ctx"]["error"]) if error["type"] == "value_error" else error["msg"]
    reason = _PLAIN_REASONS.get(error["type"], reason).removeprefix("Input ").removeprefix("Value ")
    return f"{reason[0].lower()}{reason[1:]}, not {error['input']!r}"


def _from_options(known: Collection[str], options: Mapping[str, object]) -> dict[str, Setting]:
    _refuse_unknown(known, options, where="")
    here = Path.cwd()
    return {name: Setting(value, _flag(name), here) for name, value in options.items() if value is not None}


def _from_env(known: Collection[str], env: Mapping[str, str]) -> dict[str, Setting]:
    here = Path.cwd()
    found = {}
    for variable, value in env.items():
        if not variable.startswith(ENV_PREFIX):
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        if name in known and value:
            found[name] = Setting(value, variable, here)
        elif name not in known and (close := nearest(name, known, _ENV_TYPO_SIMILARITY)):
            raise UsageError(f"unknown variable {variable}; did you mean {ENV_PREFIX}{close.upper()}?")
    return found


def _from_file(known: Collection[str], file: Path | None) -> dict[str, Setting]:
    if file is None:
        return {}
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise InputMissing(f"cannot read {file}: {reason}; check the path given to -C") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not TOML: {error}") from error
    return from_toml(text, known, str(file), file.absolute().parent)


def _refuse_unknown(known: Collection[str], names: Collection[str], where: str) -> None:
    for name in names:
        if name not in known:
            close = nearest(name, known)
            remedy = f"did you mean {close!r}?" if close else "`batchrun submit --help` lists the options"
            raise UsageError(f"unknown option {name!r}{where}; {remedy}")


def _one_line(error: ValidationError, given: Mapping[str, Setting]) -> str:
    first = error.errors(include_url=False)[0]
    if not first["loc"]:
        return str(first["ctx"]["error"]) if first["type"] == "value_error" else first["msg"]
    name = str(first["loc"][0])
    label = given[name].label if name in given else _flag(name)
    return f"{label} {plain_reason(first)}"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
