"""Ready-made sets of options by name: TOML files that ship with the package, as a user's own `-C` file would be.

Knows where they lie and what each is for, but not what its options mean: that is `job`'s.
"""

from collections.abc import Collection
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from batchrun.errors import UsageError
from batchrun.nearest import nearest
from batchrun.settings import Setting, from_toml

# The option that names one.
OPTION = "preset"
# Of these a job has one: who gives one does not want the preset's.
_EXCLUSIVE: tuple[frozenset[str], ...] = (
    frozenset({"choice", "choices_col"}),
    frozenset({"json_schema", "regex", "guided_choice", "grammar"}),
)


def preset_names() -> tuple[str, ...]:
    """All there are, in the order of the alphabet."""
    return tuple(sorted(file.name.removesuffix(".toml") for file in _folder().iterdir() if file.name.endswith(".toml")))


def preset_text(name: str) -> str:
    """The file's text. Raises UsageError: there is no such preset."""
    if name not in preset_names():
        close = nearest(name, preset_names())
        remedy = f"did you mean {close!r}?" if close else f"there are {', '.join(preset_names())}"
        raise UsageError(f"no preset {name!r}; {remedy}")
    return (_folder() / f"{name}.toml").read_text(encoding="utf-8")


def preset_about(name: str) -> str:
    """What it is for: its first line, a comment. Raises UsageError: there is no such preset."""
    return preset_text(name).splitlines()[0].lstrip("# ")


def with_preset(settings: dict[str, Setting], known: Collection[str]) -> dict[str, Setting]:
    """`settings`, and below them those of the preset that one of them names; the name itself is left out.

    Raises:
        UsageError: there is no such preset.
    """
    given = {name: setting for name, setting in settings.items() if name != OPTION}
    if OPTION not in settings:
        return given
    preset = str(settings[OPTION].value)
    below = from_toml(preset_text(preset), known, f"preset {preset}", Path.cwd())
    if "messages_col" in given and "template" in below:
        raise UsageError(f"--preset {preset} asks about a text, and --messages-col has whole messages; --prompt-col")
    replaced = {other for group in _EXCLUSIVE if group & given.keys() for other in group}
    return {name: setting for name, setting in below.items() if name not in replaced} | given


def _folder() -> Traversable:
    return files("batchrun_jobs") / "presets"
