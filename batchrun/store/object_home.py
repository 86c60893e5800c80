"""A job whose truth is on an object store, and the copy in the user's cache that a process works on.

Below OUT.batchrun are numbered heads, of which the last names the job's *generation*: a folder with the job, its plan
and its parts. A new job, a retry or an overwritten one is a generation of its own, whole before its head is created, so
that each is all of the old or all of the new. OUT is complete when `_SUCCESS` is in it, written last, and names the
generation. Every object that decides something is created if absent, never replaced.

The copy serves one process and decides nothing: whoever goes on, on whatever machine, makes a new one.
"""

import atexit
import json
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterable
from pathlib import Path

from batchrun.checkpoint import cache_folder
from batchrun.errors import OutputRefused, StoppedEarly, StorageFailed
from batchrun.filesystem import Unreachable, explain
from batchrun.store.durable import remove
from batchrun.store.layout import FOLDER_SUFFIX, Layout, read_json
from batchrun.store.object_lease import ObjectLease, last_term
from batchrun.store.objects import Object, Objects
from batchrun.store.status import is_gone
from batchrun.store.target import is_result_file

SUCCESS = "_SUCCESS"
_HEAD = re.compile(r"head-(\d{8})\.json")
_CANCEL = "cancel"
_END_BYTES = 1 << 16  # of a part: its footer
_COPY = re.compile(r"copy-(.+)-(\d+)-[0-9a-f]+")


class ObjectHome:
    """One job on an object store; `at` is the copy at hand."""

    def __init__(self, url: str, at: Layout) -> None:
        self.at = at
        self._url = url
        self._out = Objects.open(url)
        self._job = Objects.open(url + FOLDER_SUFFIX)
        self._head = 0
        self._generation: str | None = None
        self._is_shared = False
        self._pushed: dict[Path, int] = {}

    @classmethod
    def open(cls, url: str) -> "ObjectHome":
        """The job of OUT at `url`, with what tells how far it is at hand; changes nothing on the store.

        Raises:
            Unreachable: the store cannot be reached, or refuses.
            OutputRefused: results cannot be written to such a URL.
        """
        home = cls(url, Layout(_new_copy() / url.rpartition("/")[2]))
        home.at.folder.mkdir(parents=True)
        try:
            home.look()
        except StorageFailed as error:
            cause = error.__cause__
            raise Unreachable(explain(cause) if isinstance(cause, Exception) else str(error)) from error
        return home

    @property
    def output(self) -> str:
        return self._url

    def called(self, text: str) -> str:
        parts = f"{self._url}{FOLDER_SUFFIX}/{self._generation}/{self.at.parts.name}"
        return text.replace(str(self.at.parts), parts).replace(str(self.at.out), self._url)

    def refuse(self, *, overwrite: bool) -> None:
        """Raises OutputRefused unless OUT is absent, this job's, or (with `overwrite`) a result of batchrun."""
        found = self._out.find()
        strange = sorted(key for key in found if key != SUCCESS and not is_result_file(key))
        if strange:
            raise OutputRefused(
                f"{self._url} holds {strange[0]}, which is not part of a result of batchrun; move it, or choose "
                "another -o"
            )
        if self._generation is None and not overwrite and found:
            raise OutputRefused(
                f"{self._url} exists without its job folder {self.at.folder.name}; choose another -o, or --overwrite "
                "to replace it"
            )

    def hold(self) -> ObjectLease:
        """A hold of the job. Raises OutputRefused: the store lets two writers create one object."""
        self._job.refuse_without_conditions()
        return ObjectLease(self._job, self._url, self._beat)

    def show_holder(self) -> None:
        """Puts the sign of life of whoever works on the job where `status` looks for it."""
        term = last_term(self._job)
        if term is not None and not term.holder.get("released"):
            self.at.holder.write_text(json.dumps(term.holder))
            self.at.lock.touch()
            os.utime(self.at.lock, (term.object.modified, term.object.modified))

    def look(self) -> None:
        """Brings what tells how far the job is: no unit of the plan, and of the parts only their footers."""
        found = self._clear_and_list()
        light = [each for each in found if not _is_heavy(self._path(each.key))]
        self._bring(light)
        parts = [each for each in found if self._path(each.key).parent == self.at.parts]
        self.at.parts.mkdir(exist_ok=True)
        for each, end in zip(parts, self._job.read_ends(parts, _END_BYTES), strict=True):
            with self._path(each.key).open("wb") as file:
                file.truncate(each.size)
                file.seek(each.size - len(end))
                file.write(end)
        self._mark()

    def take_over(self) -> None:
        self._job.remove([_CANCEL] if self._job.find(_CANCEL) else [])
        self.look()
        if not self.at.is_complete:
            self._bring(self._generation_objects())

    def start_over(self) -> None:
        self._is_shared = False

    def share(self) -> None:
        if self._is_shared:
            return
        at, generation = self.at, secrets.token_hex(6)
        truth = (at.job, at.plan, at.parts, at.partial, at.suspects, at.retry, at.reused, at.vanished)
        files = [file for path in truth for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file()]
        self._job.put_all({f"{generation}/{file.relative_to(at.folder).as_posix()}": file for file in files})
        try:
            self._job.create(_head(self._head + 1), json.dumps({"generation": generation}).encode())
        except FileExistsError:
            raise self._too_late() from None
        self._head, self._generation, self._is_shared = self._head + 1, generation, True
        self._sweep()

    def commit(self, temporary: Path, part: Path) -> None:
        assert self._is_shared, "commit() before share()"
        self._job.create(self._key(part), temporary)
        part.hardlink_to(temporary)

    def keep(self, path: Path) -> None:
        """A file of the generation; what decides nothing, as the request to stop and the report, belongs to none."""
        if path in self._told or path == self.at.cancel:
            self._job.put(path.name, path)
        elif self._is_shared and path.exists():
            self._job.put(self._key(path), path)

    def reveal(self, tmp: Path) -> None:
        """File by file, each only where none is, and `_SUCCESS` last; what a crash leaves is written anew.

        Raises:
            OutputRefused: something else has appeared at OUT.
            StoppedEarly: another process publishes the job.
        """
        at = self.at
        if not at.ready.exists():
            return
        self.refuse(overwrite=True)
        self.keep(at.manifest)
        # First: from here on OUT counts for nothing, until it is whole.
        self._out.remove([SUCCESS] if self._out.find(SUCCESS) else [])
        self._out.remove(self._out.find())
        manifest = read_json(at.manifest) or {}
        try:
            for entry in manifest["files"]:
                self._out.create(str(entry["name"]), at.ready / str(entry["name"]))
            self._out.create(SUCCESS, json.dumps({"generation": self._generation, **manifest}, indent=1).encode())
        except FileExistsError:
            raise self._too_late() from None
        at.elsewhere.touch()
        at.overwriting.unlink(missing_ok=True)
        remove(at.ready)

    def fetch(self) -> None:
        self._bring(self._generation_objects())

    def fetch_result(self) -> None:
        self._out.fetch({key: self.at.out / key for key in self._out.find() if key != SUCCESS})

    def leave(self) -> None:
        self._push()

    def _beat(self) -> None:
        """With every sign of life: says how far the job is, and hears whether it is asked to stop."""
        self._push()
        if self._job.find(_CANCEL):
            self.at.cancel.touch()

    def _push(self) -> None:
        """What has been written since it was pushed last."""
        for path in self._told:
            if not path.exists() or self._generation is None:
                continue
            written = path.stat().st_mtime_ns
            if self._pushed.get(path) != written:
                self._job.put(path.name, path)
                self._pushed[path] = written

    @property
    def _told(self) -> tuple[Path, ...]:
        at = self.at
        return at.progress, at.series, at.metrics, at.summary, at.report, at.stuck

    def _clear_and_list(self) -> list[Object]:
        """Empties the copy; what there is of the job as its last head has it."""
        for path in self.at.folder.iterdir():
            if path != self.at.tmp:
                remove(path)
        remove(self.at.out)
        everything = self._job.find()
        heads = {int(match[1]): key for key in everything if (match := _HEAD.fullmatch(key))}
        self._head, self._generation = max(heads, default=0), None
        self._is_shared = bool(heads)
        if not heads:
            return []
        self._generation = self._read_head(heads[self._head])
        own = f"{self._generation}/", self.at.progress.name, self.at.series.name
        return [each for key, each in everything.items() if key.startswith(own)]

    def _read_head(self, key: str) -> str:
        try:
            return str(json.loads(self._job.get(key) or b"")["generation"])
        except (ValueError, KeyError, TypeError) as error:
            raise StorageFailed(f"{self._job}/{key} is damaged; delete the job folder and start again") from error

    def _generation_objects(self) -> list[Object]:
        return list(self._job.find(f"{self._generation}/").values()) if self._generation else []

    def _bring(self, objects: Iterable[Object]) -> None:
        """Downloads objects to their places, each as old as it is on the store."""
        chosen = list(objects)
        self._job.fetch({each.key: self._path(each.key) for each in chosen})
        for each in chosen:
            os.utime(self._path(each.key), (each.modified, each.modified))
            self._pushed[self._path(each.key)] = self._path(each.key).stat().st_mtime_ns

    def _mark(self) -> None:
        """Whether OUT is there, and whether it is this generation's."""
        said = self._out.get(SUCCESS)
        if said is None:
            return
        try:
            manifest = json.loads(said)
            names = {str(entry["name"]) for entry in manifest["files"]}
        except (ValueError, KeyError, TypeError):
            manifest, names = {}, set()
        is_ours = manifest.get("generation") == self._generation
        if is_ours and not names <= self._out.find().keys():
            return
        self.at.elsewhere.touch()
        if not is_ours:
            self.at.overwriting.touch()

    def _sweep(self) -> None:
        """Removes the generations before this one, and what was told of them."""
        told = (path.name for path in self._told if path.exists())
        kept = (f"{self._generation}/", _head(self._head), "lock-", _CANCEL, *told)
        self._job.remove(key for key in self._job.find() if not key.startswith(kept))

    def _key(self, path: Path) -> str:
        return f"{self._generation}/{path.relative_to(self.at.folder).as_posix()}"

    def _path(self, key: str) -> Path:
        return self.at.folder / key.removeprefix(f"{self._generation}/")

    def _too_late(self) -> StoppedEarly:
        return StoppedEarly(
            f"another process has gone on with {self._url}; this one stops and nothing is lost: "
            "run the same command again"
        )


def _head(number: int) -> str:
    return f"head-{number:08d}.json"


def _is_heavy(path: Path) -> bool:
    """Whether only whoever works on the job needs it."""
    return path.suffix != ".json" and (path.parent.name in ("plan", "parts") or path.suffix == ".parquet")


def _new_copy() -> Path:
    """An empty folder in the cache, gone when the process is; those of killed ones are removed."""
    home = cache_folder() / "copies"
    home.mkdir(parents=True, exist_ok=True)
    for folder in home.iterdir():
        match = _COPY.fullmatch(folder.name)
        if match and is_gone({"host": match[1], "pid": int(match[2])}):
            shutil.rmtree(folder, ignore_errors=True)
    copy = home / f"copy-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    copy.mkdir()
    atexit.register(shutil.rmtree, copy, ignore_errors=True)
    return copy
