"""How far a job is, for anybody who asks, while another process works on it.

Decided from what is committed: the footers of the parts. Uses the standard library only, so that it answers at
once, and only looks at the lock.
"""

import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from batchrun.store import counts
from batchrun.store.layout import Layout

# The words of the OpenAI Batch API, and three that it has no need of.
StatusWord = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "cancelling", "cancelled",
    "planned", "interrupted", "output_missing",
]  # fmt: skip
_ENDINGS = {"failed", "cancelled"}


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that works on the job now."""

    pid: int
    host: str


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """Rows; `completed` have an answer, `failed` have an error. `total` is None while the input is being planned."""

    total: int | None
    completed: int
    failed: int


@dataclass(frozen=True, slots=True)
class Status:
    """One look at a job.

    `status` "validating" means that a process plans the job; "planned" that nobody has run it yet; "cancelling" that it
    drains since `cancel` asked; "cancelled" that it was asked to stop and has saved everything, "failed" that it ended
    with an error, "interrupted" that its process was gone without a word; "output_missing" that the result was
    published and is not at OUT any more. The same command goes on from any of them. `errors` counts failed rows by
    type. `progress` is what the process said of its rates at `progress_at` (seconds since the epoch), and of the
    `error` that it failed with: `message` and `exit_code`.
    """

    output: str
    status: StatusWord
    request_counts: RequestCounts
    errors: dict[str, int]
    holder: Holder | None
    progress: dict[str, Any]
    progress_at: float | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def status(out: Path) -> Status:
    """The state of the job of OUT.

    Raises:
        InputMissing: there is no such job.
        StorageFailed: a part or the plan cannot be read.
    """
    at = Layout(out)
    at.require_job()
    # Before the parts are counted: a process that ends meanwhile has then committed all that is counted.
    holder = _holder(at)
    planned = num_planned(at)
    done = counts.total(at.list_parts())
    progress = at.read_progress()
    said = progress.get("status", "in_progress" if done.rows else None)
    return Status(
        output=str(out),
        status=_word(at, holder, planned is not None and done.rows >= planned, said),
        request_counts=RequestCounts(planned, done.rows - done.failed, done.failed),
        errors=done.errors,
        holder=holder,
        progress=progress,
        progress_at=at.progress.stat().st_mtime if progress else None,
    )


def num_planned(at: Layout) -> int | None:
    """Rows of the input according to the plan; None when there is no plan yet."""
    plan = at.read_plan_summary()
    return None if plan is None else int(plan["num_rows"])


def _word(at: Layout, holder: Holder | None, is_done: bool, said: str | None) -> StatusWord:
    if at.is_complete:
        return "completed"
    # A process that asks this of its own job, for the report, may have said already how it ends.
    if holder is not None and not (said in _ENDINGS and _is_this_process(holder)):
        return _word_of_held(at, is_done)
    if at.was_published:
        return "output_missing"
    if said is None and at.plan.exists():
        return "planned"
    # Nobody holds it: it ended as it said, or without a word.
    return next((word for word in get_args(StatusWord) if word == said and word in _ENDINGS), "interrupted")


def _is_this_process(holder: Holder) -> bool:
    return (holder.pid, holder.host) == (os.getpid(), socket.gethostname())


def _word_of_held(at: Layout, is_done: bool) -> StatusWord:
    if at.cancel.exists():
        return "cancelling"
    if is_done:
        return "finalizing"
    return "in_progress" if at.plan.exists() else "validating"


def _holder(at: Layout) -> Holder | None:
    """Who holds the lock, as far as can be told without asking for it; None when nobody does."""
    who = at.read_holder()
    if not at.shows_life or (who and is_gone(who)):
        return None
    return Holder(who.get("pid", 0), who.get("host", "?"))


def is_gone(who: dict[str, Any]) -> bool:
    """Whether the process is of this machine and has ended: the lock of a killed one stays until it is taken."""
    if who.get("host") != socket.gethostname():
        return False
    try:
        os.kill(who["pid"], 0)
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:
        return False
    return False
