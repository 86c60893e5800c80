"""Where the things of a job lie: OUT, and the job folder OUT.batchrun beside it.

Names only, by the standard library only: `status` must answer before pyarrow would be imported.
"""

import json
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchrun.errors import InputMissing, StorageFailed

_PART_NAME = re.compile(r"part-(\d{5,})-(\d{4,})\.parquet")
FIRST_FILE = "part-00000.parquet"
PLAN_FILE = "plan.json"
FOLDER_SUFFIX = ".batchrun"
LEASE_S = 30.0  # how long a holder of the lock may give no sign of life


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """One commit: rows of `unit` that finished since the commit before. Immutable once it has this name."""

    unit: int
    seq: int
    path: Path


@dataclass(frozen=True, slots=True)
class Layout:
    """The paths of one job. Nothing here touches the disk except to look."""

    out: Path

    @property
    def folder(self) -> Path:
        return self.out.with_name(self.out.name + FOLDER_SUFFIX)

    @property
    def job(self) -> Path:
        return self.folder / "job.json"

    @property
    def plan(self) -> Path:
        return self.folder / "plan"

    @property
    def estimate(self) -> Path:
        """What `batchrun plan` foretold of the run."""
        return self.plan / "estimate.json"

    @property
    def parts(self) -> Path:
        return self.folder / "parts"

    @property
    def partial(self) -> Path:
        return self.folder / "partial.arrow"

    @property
    def suspects(self) -> Path:
        return self.folder / "suspects.json"

    @property
    def stuck(self) -> Path:
        """What a process was doing when it was given up, for a person to read."""
        return self.folder / "stuck.txt"

    @property
    def progress(self) -> Path:
        return self.folder / "progress.json"

    @property
    def series(self) -> Path:
        """What the processes of the job did over time."""
        return self.folder / "series.jsonl"

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.prom"

    @property
    def summary(self) -> Path:
        return self.folder / "summary.json"

    @property
    def report(self) -> Path:
        return self.folder / "report.html"

    @property
    def lock(self) -> Path:
        """There while somebody holds the job folder, who touches it again and again; left behind by a kill."""
        return self.folder / "lock"

    @property
    def holder(self) -> Path:
        """Who has the lock, by `pid` and `host`; written by the holder, meaningful only while the lock is held."""
        return self.folder / "holder.json"

    @property
    def cancel(self) -> Path:
        """While this exists, the holder of the lock is asked to stop."""
        return self.folder / "cancel"

    @property
    def tmp(self) -> Path:
        """Names that mean nothing after a crash; swept by whoever takes the lock next."""
        return self.folder / "tmp"

    @property
    def manifest(self) -> Path:
        """Names, rows and digests of the files of OUT, written just before they appear there."""
        return self.folder / "manifest.json"

    @property
    def retry(self) -> Path:
        """Which rows run again, and with what changed; means something while their answers are not published."""
        return self.folder / "retry.json"

    @property
    def next(self) -> Path:
        """A plan, parts and `retry`, on their way to the places of those before: whoever finds them moves them on."""
        return self.folder / "next"

    @property
    def reused(self) -> Path:
        """What was copied from an earlier job, written when all of it is committed; decides nothing but that."""
        return self.folder / "reused.json"

    @property
    def vanished(self) -> Path:
        """Rows of that earlier job which the input does not have any more."""
        return self.folder / "vanished.parquet"

    @property
    def ready(self) -> Path:
        """A finished result on its way to OUT: whoever finds it there moves it on."""
        return self.folder / "ready"

    @property
    def replaced(self) -> Path:
        """A folder with the answers of an earlier job, between leaving OUT and being deleted."""
        return self.folder / "replaced"

    @property
    def overwriting(self) -> Path:
        """While this exists, OUT holds an earlier job's answers, kept readable until the new ones are ready."""
        return self.folder / "overwriting"

    @property
    def elsewhere(self) -> Path:
        """While this exists, the files of OUT are on an object store, of whose job this folder is a copy."""
        return self.folder / "elsewhere"

    @property
    def has_result(self) -> bool:
        """Whether something is at OUT, of whatever job."""
        return self.out.exists() or self.elsewhere.exists()

    @property
    def is_complete(self) -> bool:
        """Whether OUT holds the answers of the job in the job folder."""
        is_there = (self.out / self._first_file).is_file() or self.elsewhere.exists()
        return is_there and self.job.is_file() and not self.overwriting.exists()

    @property
    def was_published(self) -> bool:
        """Whether the job's answers have been at OUT, wherever they are now."""
        return self.manifest.is_file() and not self.ready.exists() and not self.overwriting.exists()

    @property
    def shows_life(self) -> bool:
        """Whether the lock was touched lately, by this machine's clock; only a hint, since clocks differ."""
        with suppress(OSError):
            return abs(time.time() - self.lock.stat().st_mtime) <= LEASE_S
        return False

    @property
    def _first_file(self) -> str:
        """Of OUT; with folders by a column's values it lies in one of them."""
        files = read_hint(self.manifest).get("files") or [{"name": FIRST_FILE}]
        return str(files[0]["name"])

    def require_job(self) -> None:
        """Raises InputMissing when there is no job, StorageFailed when that cannot be told."""
        try:
            found = self.job.is_file()
        except OSError as error:
            raise StorageFailed(f"cannot read {self.folder}: {error.strerror}") from error
        if not found:
            raise InputMissing(f"no job at {self.folder}; batchrun submit creates one")

    def list_parts(self) -> list[Part]:
        """All parts, by unit and sequence number; raises StorageFailed when the folder cannot be read."""
        try:
            matches = [(_PART_NAME.fullmatch(path.name), path) for path in self.parts.iterdir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StorageFailed(f"cannot read {self.parts}: {error.strerror}") from error
        return sorted(Part(int(match[1]), int(match[2]), path) for match, path in matches if match)

    def part(self, unit: int, seq: int) -> Part:
        return Part(unit, seq, self.parts / f"part-{unit:05d}-{seq:04d}.parquet")

    def read_plan_summary(self) -> dict[str, Any] | None:
        """The plan in numbers; None when there is no plan yet. Raises StorageFailed when it is damaged."""
        content = read_json(self.plan / PLAN_FILE)
        return None if content is None else dict(content["summary"])

    def read_progress(self) -> dict[str, Any]:
        """What the running process last said; empty when nothing readable is there."""
        return read_hint(self.progress)

    def read_holder(self) -> dict[str, Any]:
        """`pid` and `host` of whoever took the lock last; empty when nothing readable is there."""
        who = read_hint(self.holder)
        return who if isinstance(who.get("pid"), int) and isinstance(who.get("host"), str) else {}


def named_by(path: Path) -> Path:
    """The OUT of a job of which `path` is OUT or, as the shell completes it, the job folder."""
    is_folder = path.name.endswith(FOLDER_SUFFIX) and path.name != FOLDER_SUFFIX
    return (
        path.with_name(path.name.removesuffix(FOLDER_SUFFIX))
        if is_folder and not Layout(path).folder.exists()
        else path
    )


def read_hint(path: Path) -> dict[str, Any]:
    """For files that decide nothing: a damaged one is as good as none."""
    with suppress(StorageFailed):
        return read_json(path) or {}
    return {}


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None when there is no such file. Raises StorageFailed when it is damaged."""
    try:
        content = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StorageFailed(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise StorageFailed(f"{path} is damaged; delete the job folder and start again") from error
    if not isinstance(content, dict):
        raise StorageFailed(f"{path} is damaged; delete the job folder and start again")
    return content
