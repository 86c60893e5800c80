"""Input files behind URLs, through fsspec: which there are, and how to read one.

The counterpart of `pathlib.Path` for what `source` and the readers ask of a file; nothing is copied to a disk.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

import pyarrow as pa

from batchrun.errors import InputMissing
from batchrun.filesystem import Location, Unreachable, explain, failures, locate

_WILD = frozenset("*?[")
_COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One object; `version` changes with its content: the store's ETag, or the time of its last change."""

    at: Location
    path: str
    size: int
    version: str

    def __str__(self) -> str:
        return self.at.url(self.path)

    def open(self) -> IO[bytes]:
        """The content, fetched as it is read."""
        stream: IO[bytes] = self.at.filesystem.open(self.path, "rb")
        return stream


@dataclass(frozen=True, slots=True)
class Found:
    """What a URL names; `folder` is what the files' names are relative to, None for a single file or a glob."""

    files: tuple[RemoteFile, ...]
    folder: str | None


def find(url: str) -> Found:
    """The object, those of a folder in depth, or those that a glob matches; sorted, none when nothing is there.

    Raises InputMissing: the store cannot be reached, or refuses; the message says what to do.
    """
    with _reachable(url):
        at = locate(url)
        path = at.path.rstrip("/")
        if _WILD & set(path):
            found = at.filesystem.glob(path, detail=True)
            return Found(_files(at, found), None)
        if not url.endswith("/") and at.filesystem.isfile(path):
            return Found((_file(at, at.filesystem.info(path)),), None)
        return Found(_files(at, at.filesystem.find(path, detail=True)), path)


def readable(file: Path | RemoteFile) -> Any:
    """What pyarrow opens for random access."""
    return file if isinstance(file, Path) else file.open()


def stream(file: Path | RemoteFile) -> pa.NativeFile:
    """The file's bytes from its start, decompressed as its name says."""
    if isinstance(file, Path):
        return pa.input_stream(str(file), compression="detect")
    return pa.input_stream(file.open(), compression=_COMPRESSIONS.get(pure(file).suffix.lower()))


def pure(file: Path | RemoteFile) -> PurePosixPath | Path:
    """Its name and the folders above it."""
    return file if isinstance(file, Path) else PurePosixPath(file.path)


def _files(at: Location, found: dict[str, dict[str, Any]]) -> tuple[RemoteFile, ...]:
    return tuple(_file(at, found[path]) for path in sorted(found) if found[path]["type"] == "file")


def _file(at: Location, info: dict[str, Any]) -> RemoteFile:
    known = [info.get(key) for key in ("ETag", "etag", "LastModified", "mtime", "created")]
    version = next((str(each) for each in known if each), "")
    return RemoteFile(at, str(info["name"]), int(info["size"]), version)


@contextmanager
def _reachable(url: str) -> Iterator[None]:
    try:
        yield
    except Unreachable as error:
        raise InputMissing(f"cannot read {url}: {error}") from error
    except failures() as error:
        raise InputMissing(f"cannot read {url}: {explain(error)}") from error
