"""The options of the commands, made from the fields of `Job` and `Console`: declared once for flag, variable and file.

Collects what was typed, as text; what it means is decided in `Job.load`.
"""

import os
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import click
from pydantic.dataclasses import dataclass, is_pydantic_dataclass
from pydantic.fields import FieldInfo

from batchrun.job import Job
from batchrun.observe.log import LogFormat
from batchrun.observe.progress import ProgressMode
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


assert is_pydantic_dataclass(Console)
_CONSOLE_FIELDS: dict[str, FieldInfo] = Console.__pydantic_fields__


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
    """INPUT…, an option for every field of the job in the order of the fields, and those of the console."""
    fields = [FieldOption(name, field) for name, field in Job.model_fields.items() if name != "inputs"]
    return [click.Argument(["inputs"], nargs=-1, metavar="INPUT..."), *fields, *console_options()]


def console_options() -> list[click.Parameter]:
    """An option for every field of the console, and -C."""
    config = click.Option(["-C", "--config"], metavar="FILE", help="TOML file with options; flags and variables win.")
    return [*(FieldOption(name, field) for name, field in _CONSOLE_FIELDS.items()), config]


def load_job(given: Mapping[str, Any]) -> Job:
    """The job from the flags, variables and file of the current command."""
    also = [*_CONSOLE_FIELDS, "config"]
    return Job.load(_typed(given, Job.model_fields), os.environ, _config(given), also=also)


def load_console(given: Mapping[str, Any]) -> Console:
    """The console's settings from the same three places."""
    known = [*_CONSOLE_FIELDS, *Job.model_fields, "config"]
    settings = merge(known, _typed(given, _CONSOLE_FIELDS), os.environ, _config(given))
    chosen = {name: setting for name, setting in settings.items() if name in _CONSOLE_FIELDS}
    return validated(Console, {name: setting.value for name, setting in chosen.items()}, chosen)


def _typed(given: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """What was typed; click has an empty tuple for a repeatable option that was not."""
    return {name: given[name] for name in names if given[name] not in (None, ())}


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
