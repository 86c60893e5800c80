"""Whether OUT and its job folder can be written where they were asked for, before any work is done.

Every refusal is an OutputRefused that says what is in the way and what to do. `refuse` changes nothing.
"""

import os
import re
from contextlib import suppress
from pathlib import Path

from batchrun.errors import OutputRefused
from batchrun.store.durable import new_name, remove, sync_folder
from batchrun.store.layout import FIRST_FILE, Layout, named_by

_RESULT_FILE = re.compile(r"([^/]+=[^/]*/)?part-\d{5,}\.parquet|[^/]+=[^/]*/")


def refuse(at: Layout, *, overwrite: bool) -> None:
    """Raises OutputRefused unless OUT is absent, this job folder's, or (with `overwrite`) a result of batchrun."""
    try:
        if at.folder.exists() and not at.folder.is_dir():
            raise OutputRefused(f"{at.folder} is in the way of the job folder; move it, or choose another -o")
        _refuse_inside(at)
        if os.path.lexists(at.out):
            refuse_foreign(at, overwrite=overwrite)
        _refuse_unwritable(at)
    except OSError as error:
        # Not even looking is permitted.
        raise uncreatable(at.out, error) from error


def is_result_file(name: str) -> bool:
    """Whether something of this name, relative to OUT, a folder with a slash behind it, can be part of a result."""
    return _RESULT_FILE.fullmatch(name) is not None


def refuse_foreign(at: Layout, *, overwrite: bool) -> None:
    """Raises OutputRefused when OUT, which exists, is not a result that this job may have or replace."""
    if not at.out.is_dir():
        raise OutputRefused(f"{at.out} is not a folder; move it, or choose another -o")
    paths = list(at.out.rglob("*"))
    names = [path.relative_to(at.out).as_posix() + "/" * path.is_dir() for path in paths]
    strange = sorted(name for name in names if not is_result_file(name))
    # Also with `overwrite`: a folder with anything else in it is never ours to delete.
    if strange or FIRST_FILE not in {path.name for path in paths}:
        if at.was_published:
            raise _damaged(at, strange)
        raise OutputRefused(f"{at.out} exists and is not a result of batchrun; move it, or choose another -o")
    if not overwrite and not at.job.is_file():
        raise OutputRefused(
            f"{at.out} exists without its job folder {at.folder.name}; choose another -o, or --overwrite to replace it"
        )


def _refuse_inside(at: Layout) -> None:
    """Of another job: its result would have files that are no part of it, and its folder is its own to sweep."""
    for folder in at.out.absolute().parents:
        if folder.name and Layout(named_by(folder)).job.is_file():
            raise OutputRefused(f"{at.out} lies inside {folder}, which is another job's; choose another -o")


def _damaged(at: Layout, strange: list[str]) -> OutputRefused:
    """What to say of this job's own result after somebody put `strange` files into it or took files out."""
    if not strange:
        return OutputRefused(
            f"{at.out} has lost files; move it away and run the same command again: every row's result is kept"
        )
    more = f" and {len(strange) - 1:,} more" if strange[1:] else ""
    return OutputRefused(
        f"{at.out} holds {strange[0]}{more}, which is not part of the result; move it elsewhere and run the same "
        "command again"
    )


def create_folder(at: Layout) -> list[Path]:
    """Creates the job folder; returns the folders that were not there before, the innermost first."""
    missing = [path for path in (at.folder, *at.folder.parents) if not path.exists()]
    try:
        at.folder.mkdir(parents=True, exist_ok=True)
        for path in missing:
            # A part is only as durable as the names of all folders above it.
            sync_folder(path.parent)
    except OSError as error:
        raise uncreatable(at.folder, error) from error
    return missing


def remove_folder(at: Layout, created: list[Path]) -> None:
    """Removes the job folder's own files, then it and the folders in `created`, as far as nothing else is in them."""
    for path in (at.tmp, at.job, at.parts, at.progress, at.cancel, at.lock):
        remove(path)
    for folder in [at.folder, *created]:
        with suppress(OSError):
            folder.rmdir()


def refuse_without_links(at: Layout, tmp: Path) -> None:
    """Raises OutputRefused on a disk where no part could be committed; leaves nothing behind in `tmp`."""
    file, link = new_name(tmp, "probe"), new_name(tmp, "link")
    file.touch()
    try:
        link.hardlink_to(file)
    except OSError as error:
        raise OutputRefused(
            f"the disk of {at.folder} has no hard links ({error.strerror}); choose an -o on another disk"
        ) from error
    finally:
        remove(link)
        remove(file)


def uncreatable(path: Path, error: OSError) -> OutputRefused:
    reason = os.strerror(error.errno) if error.errno else str(error)
    return OutputRefused(f"cannot create {path}: {reason}; choose another -o")


def _refuse_unwritable(at: Layout) -> None:
    nearest = next(path for path in (at.folder, *at.folder.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise OutputRefused(f"cannot create {at.out}: {nearest} is not a folder; choose another -o")
    for folder in {nearest, at.out.absolute().parent} if nearest == at.folder else {nearest}:
        if not os.access(folder, os.W_OK | os.X_OK):
            raise OutputRefused(f"cannot create {at.out}: no permission to write in {folder}; choose another -o")
