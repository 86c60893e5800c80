"""The objects below one URL of an S3 store: conditional writes, and what listings say.

A name may be created by one writer only, which is all that a job needs of a store (`create`). Knows nothing of jobs.
"""

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from batchrun.errors import OutputRefused, StorageFailed
from batchrun.filesystem import Location, Unreachable, explain, failures, locate

_CONFLICT = "ConditionalRequestConflict"  # two writers at once; S3 asks to try again
_TAKEN = {"PreconditionFailed", "412"}
_STRANGE = {"", ".", ".."}
_ATTEMPTS = 5
_WRITER = "writer"


@dataclass(frozen=True, slots=True)
class Object:
    """What a listing says of one object; `modified` is the store's time, seconds since the epoch."""

    key: str
    size: int
    etag: str
    modified: float


class Objects:
    """Objects by their keys below `url`. Everything here raises StorageFailed when the store fails."""

    def __init__(self, at: Location) -> None:
        self._at = at
        self._filesystem = at.filesystem

    @classmethod
    def open(cls, url: str) -> "Objects":
        """Asks nobody yet. Raises OutputRefused: not an s3:// URL, or what reads one is not installed."""
        if not re.fullmatch("s3://[^/]+/.+", url) and url.startswith("s3://"):
            raise OutputRefused(f"{url} is no name in a bucket; give -o s3://BUCKET/NAME")
        if not url.startswith("s3://"):
            raise OutputRefused(f"{url}: results can be written to s3:// and to mounted disks; choose another -o")
        try:
            return cls(locate(url))
        except Unreachable as error:
            raise OutputRefused(f"cannot write {url}: {error}") from error

    def __str__(self) -> str:
        return self._at.url(self._at.path)

    def find(self, prefix: str = "") -> dict[str, Object]:
        """All objects whose key starts with `prefix`, by key; none whose key would lead out of a folder on a disk."""
        folder, _, start = prefix.rpartition("/")
        with self._failing(prefix):
            found = self._filesystem.find(self._path(folder), prefix=start, detail=True)
        above = len(self._at.path) + 1
        objects = [_object(path[above:], info) for path, info in found.items() if info["type"] == "file"]
        return {each.key: each for each in objects if not _STRANGE & set(each.key.split("/"))}

    def create(self, key: str, content: bytes | Path) -> None:
        """Writes a new object, whole. Raises FileExistsError when the key is taken: of two writers one succeeds."""
        writer = secrets.token_hex(8)
        with self._failing(key):
            for _ in range(_ATTEMPTS):
                try:
                    return self._write(key, content, mode="create", Metadata={_WRITER: writer})
                except OSError as error:
                    if _code(error) == _CONFLICT:
                        continue
                    if not _is_taken(error):
                        raise
                    # An answer may be lost and the request sent again: then it is our own object that is in the way.
                    if self._filesystem.metadata(self._path(key)).get(_WRITER) == writer:
                        return None
                    break
        raise FileExistsError(f"{self}/{key} exists")

    def put(self, key: str, content: bytes | Path) -> None:
        """Writes an object in the place of the one before."""
        with self._failing(key):
            self._write(key, content)

    def put_all(self, sources: Mapping[str, Path]) -> None:
        """Writes objects, several at a time."""
        if sources:
            with self._failing(next(iter(sources))):
                paths = [self._path(key) for key in sources]
                self._filesystem.put([str(path) for path in sources.values()], paths)

    def get(self, key: str) -> bytes | None:
        """The content; None when there is no such object."""
        with self._failing(key):
            try:
                return bytes(self._filesystem.cat_file(self._path(key)))
            except FileNotFoundError:
                return None

    def fetch(self, targets: Mapping[str, Path]) -> None:
        """Downloads objects, several at a time; the folders of the targets are made."""
        for folder in {target.parent for target in targets.values()}:
            folder.mkdir(parents=True, exist_ok=True)
        if targets:
            with self._failing(next(iter(targets))):
                self._filesystem.get([self._path(key) for key in targets], [str(path) for path in targets.values()])

    def read_ends(self, objects: Iterable[Object], num_bytes: int) -> list[bytes]:
        """The last bytes of each object, several at a time."""
        chosen = list(objects)
        if not chosen:
            return []
        starts = [max(each.size - num_bytes, 0) for each in chosen]
        paths = [self._path(each.key) for each in chosen]
        with self._failing(chosen[0].key):
            found: list[bytes] = self._filesystem.cat_ranges(paths, starts, [each.size for each in chosen])
        return found

    def remove(self, keys: Iterable[str]) -> None:
        """Removes objects, as far as they are there."""
        paths = [self._path(key) for key in keys]
        if paths:
            # Not found: somebody else has removed them.
            with self._failing(""), suppress(FileNotFoundError):
                self._filesystem.rm(paths)

    def refuse_without_conditions(self) -> None:
        """Raises OutputRefused: no such bucket, no permission, or two writers could both create one object."""
        key = f"probe-{secrets.token_hex(6)}"
        try:
            self.create(key, b"first")
            try:
                self.create(key, b"second")
            except FileExistsError:
                return
            finally:
                self.remove([key])
        except StorageFailed as error:
            cause = error.__cause__
            raise OutputRefused(
                f"cannot write {self}: {explain(cause) if isinstance(cause, Exception) else error}"
            ) from error
        raise OutputRefused(
            f"cannot write {self}: this store does not heed If-None-Match, so that two processes could both write a "
            "result; choose an -o on a store that does, or on a disk"
        )

    def _path(self, key: str) -> str:
        return f"{self._at.path}/{key}" if key else self._at.path

    def _write(self, key: str, content: bytes | Path, **options: Any) -> None:
        if isinstance(content, Path):
            self._filesystem.put_file(str(content), self._path(key), **options)
        else:
            self._filesystem.pipe_file(self._path(key), content, **options)

    @contextmanager
    def _failing(self, key: str) -> Iterator[None]:
        try:
            yield
        except failures() as error:
            raise StorageFailed(
                f"{self}/{key}: {explain(error)}, then run the same command again: it goes on from the last commit"
            ) from error


def _object(key: str, info: Mapping[str, Any]) -> Object:
    modified = info.get("LastModified")
    seconds = modified.timestamp() if isinstance(modified, datetime) else 0.0
    return Object(key, int(info["size"]), str(info.get("ETag", "")), seconds)


def _is_taken(error: OSError) -> bool:
    return isinstance(error, FileExistsError) or _code(error) in _TAKEN


def _code(error: OSError) -> str:
    """S3's own word for what went wrong."""
    response = getattr(error.__cause__, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))
