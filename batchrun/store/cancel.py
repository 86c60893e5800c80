"""Asking whoever works on a job to stop, through the job folder: from any host that sees it."""

from pathlib import Path

from batchrun.store.durable import storage_errors
from batchrun.store.layout import Layout
from batchrun.store.status import Holder, status


def cancel(out: Path) -> Holder | None:
    """Leaves the request for the process that holds the job of OUT; None when nobody does, and nothing is left then.

    Returns at once: the process sees it at its next sign of progress, drains, saves and ends. The next process on the
    job does not heed it any more.

    Raises:
        InputMissing: there is no such job.
        StorageFailed: the request cannot be written.
    """
    at = Layout(out)
    holder = status(out).holder
    if holder is not None:
        with storage_errors(at.cancel):
            at.cancel.touch()
    return holder
