"""The job verbs that end with a result: submit and resume.

The same call goes on where the last one stopped, and returns at once when the job is complete.
"""

from pathlib import Path

from batchrun.job import Job
from batchrun.observe.events import Observe
from batchrun.opened import as_found, open_job, stored_job
from batchrun.outcome import Outcome
from batchrun.stop import StopRequest


def submit(job: Job, observe: Observe, stop: StopRequest) -> Outcome:
    """Brings the job to its end from wherever it is.

    Raises:
        StoppedEarly, StoppedByUser: `stop` was raised, by a signal, the deadline or `batchrun cancel`, or another
            process holds the job; what was done is saved.
        BatchrunError: the job is wrong, or a disk or the engine failed; what was committed stays.
    """
    opened = open_job(job)
    if opened.is_answered:
        with opened.store.lock(job.wait_lock):
            # Until now another process may have held it.
            if opened.is_answered:
                opened.claim()
                return as_found(opened)
    # Imported here: a complete job needs no planner, engine or report, and so is found complete in no time.
    from batchrun.running import run

    return run(opened, observe, stop)


def resume(output: Path | str, observe: Observe, stop: StopRequest) -> Outcome:
    """Brings the job that is stored beside `output` to its end.

    Raises:
        BatchrunError: as `submit`, or there is no such job.
    """
    return submit(stored_job(output), observe, stop)
