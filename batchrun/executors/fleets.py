"""A plan run by several workers: processes of this machine, or Ray's actors."""

import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from batchrun import __version__
from batchrun.errors import UsageError
from batchrun.executors.driver import Driver, Fleet
from batchrun.executors.local import Ran
from batchrun.executors.messages import Brief
from batchrun.executors.processes import LocalProcesses
from batchrun.job import Job
from batchrun.model_spec import ModelSpec
from batchrun.observe.events import Message, Observe
from batchrun.observe.log import LOGGER
from batchrun.plan.plan import Plan
from batchrun.plan.sharing import decide
from batchrun.stop import StopRequest
from batchrun.store.store import Store


def has_fleet(job: Job) -> bool:
    """Whether the job is for workers in processes of their own."""
    return job.executor == "ray" or job.workers > 1


def check_installed(job: Job) -> None:
    """Raises UsageError when the job's executor is an extra that is not there."""
    if job.executor == "ray" and importlib.util.find_spec("ray") is None:
        raise UsageError("--executor ray needs the library Ray: pip install 'batchrun[ray]'")


def run(job: Job, plan: Plan, spec: ModelSpec, store: Store, observe: Observe, stop: StopRequest) -> Ran:
    """Runs the plan's pending rows with as many workers as the job wants; each loads the weights for it.

    Raises:
        ModelUnavailable: the model cannot be loaded or served exactly by a worker, or is another there.
        DataError: a row needs more KV than a worker's pool holds.
        UsageError: there is no such cluster, or no such GPU.
        EngineFailed: workers are lost again and again.
    """
    sharing = decide(job.prefix_caching, plan.summary)
    if sharing.reason:
        observe(Message("info", f"prefix caching is off: {sharing.reason}"))
    # Each would say the same.
    log_level = LOGGER.getEffectiveLevel()
    log_level = logging.WARNING if log_level == logging.INFO else log_level
    brief = Brief(job, plan.summary, spec.digest, __version__, log_level=log_level)
    with _fleet(job) as fleet:
        LOGGER.info("%d workers load %s", job.workers, spec.name)
        return Driver(brief, job.workers, fleet, plan, store, observe, stop).run()


@contextmanager
def _fleet(job: Job) -> Iterator[Fleet]:
    if job.executor == "local":
        yield LocalProcesses(job.workers)
        return
    # Its library is an extra.
    from batchrun.executors.ray_actors import ray_actors

    with ray_actors(job.ray_address, job.workers, job.device) as fleet:
        yield fleet
