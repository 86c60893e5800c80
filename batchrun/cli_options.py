"""The options of the commands, made from the fields of `Job`, `Console`, `Tuning` and `Simulating`.

Each is declared once for flag, variable and file.
Collects what was typed, as text; what it means is decided in `Job.load`.
"""

import os
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import click
from pydantic.dataclasses import dataclass, is_pydantic_dataclass
from pydantic.fields import FieldInfo

from batchrun import presets
from batchrun.errors import UsageError
from batchrun.job import CHANGEABLE, MEASURED, Job
from batchrun.observe.log import LogFormat
from batchrun.observe.progress import ProgressMode
from batchrun.option_types import WorkforcesText
from batchrun.settings import merge, option, validated

_SHORT = {
    "output": "-o", "model": "-m", "template": "-t", "system": "-s", "limit": "-L", "quiet": "-q", "verbose": "-v",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Console:
    """How a command talks while it works; no part of the job."""

    json: bool = option("Console", False, "The result on stdout as one JSON object.")
    quiet: bool = option("Console", False, "Warnings and errors only.")
    verbose: bool = option("Console", False, "Say more.")
    progress: ProgressMode = option("Console", "auto", "Bar on a terminal, a line a minute elsewhere.")
    log_format: LogFormat = option("Console", "text", "Lines on stderr as text or as JSON objects.")


@dataclass(frozen=True, slots=True)
class Tuning:
    """What `tune` is for, and how long it takes."""

    alpha: float = option("Tune", 1.0, "Weight of the time until a row has its first token, its wait included.", ge=0)
    beta: float = option("Tune", 0.0, "Weight of the time from one token of a row to the next.", ge=0)
    quick: bool = option("Tune", False, "A quarter of the time, and less exact.")


@dataclass(frozen=True, slots=True)
class Simulating:
    """What `plan` says about several workers."""

    simulate: WorkforcesText = option(
        "Fleet",
        None,
        "Also say what the plan takes so many workers, on this device or another: 8, 1,2,4, 1..64, 8xh100-80gb.",
        "WORKERS[xDEVICE]",
    )
    cost_per_hour: float | None = option("Fleet", None, "What a worker costs, for the cost of each.", "X", gt=0)


assert is_pydantic_dataclass(Console)
assert is_pydantic_dataclass(Tuning)
assert is_pydantic_dataclass(Simulating)
_CONSOLE_FIELDS: dict[str, FieldInfo] = Console.__pydantic_fields__
_TUNING_FIELDS: dict[str, FieldInfo] = Tuning.__pydantic_fields__
_SIMULATING_FIELDS: dict[str, FieldInfo] = Simulating.__pydantic_fields__
# May stand in a file beside a job's own.
_BESIDE = (*_CONSOLE_FIELDS, *_TUNING_FIELDS, *_SIMULATING_FIELDS, presets.OPTION, "config")
_Settings = TypeVar("_Settings")


class JobCommand(click.Command):
    """A command whose `--help` shows the options in the sections of their fields."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if isinstance(parameter, click.Option) and record is not None:
                sections.setdefault(getattr(parameter, "section", "Console"), []).append(record)
        for section, records in sections.items():
            with formatter.section(section):
                formatter.write_dl(records)


class FieldOption(click.Option):
    """An option made from a field: `section` is its place in `--help`."""

    def __init__(self, name: str, field: FieldInfo) -> None:
        extra = field.json_schema_extra
        assert isinstance(extra, dict), name
        self.section = str(extra["group"])
        kind = _kind(field.annotation)
        flag = "--" + name.replace("_", "-")
        super().__init__(
            [flag, name] + ([_SHORT[name]] if name in _SHORT else []),
            is_flag=kind is bool,
            multiple=get_origin(kind) is tuple,
            default=None,
            metavar=None if kind is bool else extra["metavar"] or _metavar(kind),
            help=_help(field),
        )


def job_options() -> list[click.Parameter]:
    """INPUT…, a preset, an option for every field of the job in the order of the fields, and those of the console."""
    preset = FieldOption(presets.OPTION, option("Task", None, "Options of this name; `batchrun presets`.", "NAME"))
    fields = [FieldOption(name, field) for name, field in Job.model_fields.items() if name != "inputs"]
    return [click.Argument(["inputs"], nargs=-1, metavar="INPUT..."), preset, *fields, *console_options()]


def plan_options() -> list[click.Parameter]:
    """Those of a job, and what else is to be said about it."""
    return [*job_options(), *(FieldOption(name, field) for name, field in _SIMULATING_FIELDS.items())]


def tune_options() -> list[click.Parameter]:
    """MODEL, and the options that say what is measured and what for."""
    fields = {**{name: Job.model_fields[name] for name in MEASURED}, **_TUNING_FIELDS}
    options = [FieldOption(name, field) for name, field in fields.items()]
    return [click.Argument(["model"], required=False, metavar="[MODEL]"), *options, *console_options()]


def retry_options() -> list[click.Parameter]:
    """OUT, which rows, the options that may differ for them, and those of the console."""
    where = FieldOption(
        "where", option("Rows", None, "Condition in SQL over OUT's columns. Default: failed rows.", "SQL")
    )
    fields = [FieldOption(name, Job.model_fields[name]) for name in CHANGEABLE]
    return [click.Argument(["output"], metavar="OUT"), where, *fields, *console_options()]


def typed_changes(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `retry_options` that were typed and may differ; variables and files are about all rows."""
    return _typed(given, CHANGEABLE)


def console_options() -> list[click.Parameter]:
    """An option for every field of the console, and -C."""
    config = click.Option(["-C", "--config"], metavar="FILE", help="TOML file with options; flags and variables win.")
    return [*(FieldOption(name, field) for name, field in _CONSOLE_FIELDS.items()), config]


def load_job(given: Mapping[str, Any]) -> Job:
    """The job from the flags, variables and file of the current command."""
    return Job.load(_typed(given, (*Job.model_fields, presets.OPTION)), os.environ, _config(given), also=_BESIDE)


def load_console(given: Mapping[str, Any]) -> Console:
    """The console's settings from the same three places."""
    return _load(Console, _CONSOLE_FIELDS, given)


def load_tuning(given: Mapping[str, Any]) -> Tuning:
    """What to tune for, from the same three places."""
    return _load(Tuning, _TUNING_FIELDS, given)


def load_simulating(given: Mapping[str, Any]) -> Simulating:
    """What `plan` is to simulate, from the same three places. Raises UsageError for a price of nothing."""
    simulating = _load(Simulating, _SIMULATING_FIELDS, given)
    if simulating.cost_per_hour is not None and simulating.simulate is None:
        raise UsageError("--cost-per-hour is the price of a worker; say how many with --simulate, such as 1..64")
    return simulating


def _load(kind: type[_Settings], fields: Mapping[str, FieldInfo], given: Mapping[str, Any]) -> _Settings:
    settings = merge([*_BESIDE, *Job.model_fields], _typed(given, fields), os.environ, _config(given))
    chosen = {name: setting for name, setting in settings.items() if name in fields}
    return validated(kind, {name: setting.value for name, setting in chosen.items()}, chosen)


def _typed(given: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """What was typed; click has an empty tuple for a repeatable option that was not."""
    return {name: given[name] for name in names if given.get(name) not in (None, ())}


def _config(given: Mapping[str, Any]) -> Path | None:
    file = given["config"] or os.environ.get("BATCHRUN_CONFIG")
    return Path(file) if file else None


def _kind(annotation: Any) -> Any:
    """The annotation without `| None`."""
    if get_origin(annotation) in (Union, types.UnionType):
        return next(part for part in get_args(annotation) if part is not type(None))
    return annotation


def _metavar(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    return {int: "N", float: "X"}.get(kind, "TEXT")


def _help(field: FieldInfo) -> str:
    shown = field.default
    if field.is_required() or shown in (None, "", ()) or shown is False:
        return field.description or ""
    return f"{field.description} [{shown:g}]" if isinstance(shown, float) else f"{field.description} [{shown}]"
