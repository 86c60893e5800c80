"""Writes that survive a crash: what has its name has its content, and keeps both after a power cut.

Knows nothing of jobs. Every function here is one transition; what came before it is durable when it returns.
"""

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from batchrun.errors import StorageFailed

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turns an operating system's error about `path` into a StorageFailed with the remedy."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        remedy = "free some space" if error.errno in _FULL else "check the disk and its permissions"
        raise StorageFailed(
            f"{path}: {reason}; {remedy}, then run the same command again: it goes on from the last commit"
        ) from error


def sync_file(path: Path) -> None:
    _sync(path, os.O_RDONLY)


def sync_folder(path: Path) -> None:
    """Makes names that were created, renamed or removed in `path` durable."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def link_if_absent(source: Path, target: Path) -> None:
    """Gives a finished file its final name, or raises FileExistsError when somebody else has taken it.

    Unlike a rename, a link never replaces: of two writers exactly one succeeds, on local and on network disks.
    """
    # The content first: a name that survives a power cut must not stand for a file that did not.
    sync_file(source)
    target.hardlink_to(source)
    # Then the name: only what survives a power cut may be reported as done.
    sync_folder(target.parent)


def replace_file(source: Path, target: Path) -> None:
    """Puts a finished file in the place of `target`; a reader sees the old or the new content, never less."""
    # The content before the name, the name before the return, as in `link_if_absent`.
    sync_file(source)
    source.replace(target)
    sync_folder(target.parent)


def write_file(target: Path, content: bytes, tmp: Path) -> None:
    """Writes `target` whole or not at all, through a temporary name in the folder `tmp` of the same disk."""
    source = new_name(tmp, target.name)
    try:
        source.write_bytes(content)
        replace_file(source, target)
    finally:
        source.unlink(missing_ok=True)


def new_name(tmp: Path, name: str) -> Path:
    """A name in `tmp` that no other process uses, on this machine or another."""
    return tmp / f"{secrets.token_hex(6)}-{name}"


def remove(path: Path) -> None:
    """Removes a file or a whole folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        # Only what was seen: a process that was paused here must not remove what its successor has made since.
        path.unlink(missing_ok=True)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
