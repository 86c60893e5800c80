"""The jobs below a folder, found by their job folders. The standard library only."""

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from batchrun.errors import BatchrunError
from batchrun.store.layout import FOLDER_SUFFIX, Layout
from batchrun.store.status import Status, status


@dataclass(frozen=True, slots=True)
class Listed:
    """One job, last heard of `at` (seconds since the epoch); `status` is None where `problem` forbids to say."""

    output: str
    at: float
    status: Status | None
    problem: str = ""

    def to_dict(self) -> dict[str, Any]:
        found = None if self.status is None else asdict(self.status)
        return {"output": self.output, "at": self.at, "problem": self.problem, "job": found}


def list_jobs(folder: Path) -> tuple[Listed, ...]:
    """Every job whose folder is in `folder` or below it, the latest first; a damaged one is among them.

    Does not look into jobs and results, nor follow links to folders.
    """
    found = [look_at(out) for out in _outputs(folder)]
    return tuple(sorted(found, key=lambda job: (-job.at, job.output)))


def look_at(out: Path) -> Listed:
    """The job of OUT as a line of the list."""
    at = Layout(out)
    heard = max((_modified(path) for path in (at.job, at.progress, at.manifest, at.plan)), default=0.0)
    try:
        return Listed(str(out), heard, status(out))
    except BatchrunError as error:
        return Listed(str(out), heard, None, str(error))


def _outputs(folder: Path) -> list[Path]:
    outputs = []
    for path, names, _ in os.walk(folder):
        jobs = {name for name in names if _is_job(Path(path) / name)}
        outs = {name.removesuffix(FOLDER_SUFFIX) for name in jobs}
        outputs += [Path(path) / out for out in outs]
        names[:] = sorted({*names} - jobs - outs)
    return outputs


def _is_job(folder: Path) -> bool:
    has_name = folder.name.endswith(FOLDER_SUFFIX) and folder.name != FOLDER_SUFFIX
    return has_name and (folder / "job.json").is_file()


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
