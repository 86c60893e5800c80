"""A job to look at, wherever it is: on a disk as it lies there, on an object store as a copy.

The standard library only, until something is on an object store.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from batchrun.errors import BatchrunError, InputMissing, OutputRefused
from batchrun.filesystem import Unreachable, is_url, tidy
from batchrun.store.layout import FOLDER_SUFFIX, Layout, named_by

if TYPE_CHECKING:
    from batchrun.store.object_home import ObjectHome


@dataclass(frozen=True, slots=True)
class Here:
    """A job on a disk."""

    at: Layout

    @property
    def output(self) -> Path:
        return self.at.out

    def called(self, text: str) -> str:
        """The text with the names of files at hand as the user would call them."""
        return text

    def keep(self, path: Path) -> None:
        """It lies where it belongs."""

    def fetch(self) -> None:
        """Everything is at hand."""

    def fetch_result(self) -> None:
        """Everything is at hand."""


def named(text: str) -> Path | str:
    """The OUT of a job that a user calls `text`, which may also be its job folder: a path, or a URL."""
    if is_url(text):
        return tidy(text).removesuffix(FOLDER_SUFFIX)
    return named_by(Path(text))


@contextmanager
def at_hand(text: str) -> Iterator["Here | ObjectHome"]:
    """The job that a user calls `text`, with what tells how far it is.

    `fetch` brings the plan and the parts, `fetch_result` brings OUT.

    Raises:
        InputMissing: its store cannot be reached.
    """
    output = named(text)
    if isinstance(output, Path):
        yield Here(Layout(output))
        return
    from batchrun.store.object_home import ObjectHome

    try:
        home = ObjectHome.open(output)
    except (Unreachable, OutputRefused) as error:
        raise InputMissing(f"cannot read {output}: {error}") from error
    with as_called(home):
        home.show_holder()
        yield home


class _Called(Protocol):
    def called(self, text: str) -> str: ...


@contextmanager
def as_called(home: _Called) -> Iterator[None]:
    """Errors that name files at hand name them as the user would."""
    try:
        yield
    except BatchrunError as error:
        error.args = tuple(home.called(part) if isinstance(part, str) else part for part in error.args)
        raise
