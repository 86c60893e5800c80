"""Asking whoever works on a job to stop, through the job folder: from any host that sees it."""

from typing import TYPE_CHECKING

from batchrun.store.at_hand import Here
from batchrun.store.durable import storage_errors
from batchrun.store.status import Holder, status

if TYPE_CHECKING:
    from batchrun.store.object_home import ObjectHome


def cancel(job: "Here | ObjectHome") -> Holder | None:
    """Leaves the request for the process that holds the job; None when nobody does, and nothing is left then.

    Returns at once: the process sees it at its next sign of progress, drains, saves and ends. The next process on the
    job does not heed it any more.

    Raises:
        InputMissing: there is no such job.
        StorageFailed: the request cannot be written.
    """
    at = job.at
    holder = status(at.out).holder
    if holder is not None:
        with storage_errors(at.cancel):
            at.cancel.touch()
        job.keep(at.cancel)
    return holder
