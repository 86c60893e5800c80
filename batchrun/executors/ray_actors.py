"""Workers that are Ray actors, on whatever nodes its cluster has or gets while the job runs.

Ray places them, says when one is lost, and ends them when the driver is gone. The one module that knows Ray, which is
an extra.
"""

import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from batchrun.errors import UsageError
from batchrun.executors import member
from batchrun.executors.messages import Brief, FromWorker, Lost, ToWorker
from batchrun.option_types import DeviceName

_log = logging.getLogger(__name__)
_OURS = ("RAY_USAGE_STATS_ENABLED", "RAY_worker_niceness")
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_CALLS_AT_ONCE = 4  # of an actor: it works, is told, is heard, and one more
_ANSWERS_WITHIN_S = 10.0
_ROOM_WITHIN_S = 30.0
_STORE_BYTES = 256 << 20  # of a cluster that is started here: what passes through it is small


@dataclass(frozen=True, slots=True)
class Size:
    """What an actor takes of its node. So many of them fit the largest one."""

    num_cpus: int
    num_gpus: int
    num_sharing: int


class Actor:
    """A worker in an actor's process. `work` lasts until it has ended; meanwhile it is told things, and is heard."""

    def __init__(self, num_threads: int) -> None:
        # Before torch is imported.
        os.environ["OMP_NUM_THREADS"] = str(num_threads)
        self._inbox: SimpleQueue[ToWorker] = SimpleQueue()
        self._outbox: SimpleQueue[FromWorker] = SimpleQueue()

    def work(self, brief: Brief) -> None:
        # Ray ends the actor when its driver is gone.
        member.work(brief, self, on_driver_gone=lambda: None)

    def node(self) -> str:
        """The id of its node."""
        return str(ray.get_runtime_context().get_node_id())

    def tell(self, message: ToWorker) -> None:
        self._inbox.put(message)

    def hear(self) -> list[FromWorker]:
        """What it has to say by now; waits for the first word."""
        heard = [self._outbox.get()]
        while not self._outbox.empty():
            heard.append(self._outbox.get())
        return heard

    def send(self, message: FromWorker) -> None:
        self._outbox.put(message)

    def receive(self) -> ToWorker:
        return self._inbox.get()


@dataclass(slots=True)
class _Running:
    """An actor, and references to what its calls return: `work` until it has, the `hear` under way, and `node`."""

    actor: Any
    working: Any
    hearing: Any
    node: Any


class RayActors:
    """A fleet of actors, each of the same size. One for which there is no room begins when there is."""

    def __init__(self, size: Size) -> None:
        self._size = size
        self._running: dict[int, _Running] = {}
        self._tells_at = time.monotonic() + _ROOM_WITHIN_S  # that none has found room

    def start(self, worker: int, brief: Brief) -> None:
        size = self._size
        actor = (
            ray.remote(Actor)
            .options(
                num_cpus=size.num_cpus,
                num_gpus=size.num_gpus,
                max_concurrency=_CALLS_AT_ONCE,
                scheduling_strategy="SPREAD",
            )
            .remote(size.num_cpus)
        )
        working = actor.work.remote(replace(brief, num_sharing=size.num_sharing))
        self._running[worker] = _Running(actor, working, actor.hear.remote(), actor.node.remote())

    def send(self, worker: int, message: ToWorker) -> None:
        self._running[worker].actor.tell.remote(message)

    def receive(self, timeout_s: float) -> list[tuple[int, FromWorker | Lost]]:
        workers = {each.hearing: worker for worker, each in self._running.items()}
        workers |= {each.working: worker for worker, each in self._running.items() if each.working is not None}
        waited = [*workers]
        self._tell_of_room()
        if not ray.wait(waited, timeout=timeout_s)[0]:
            return []
        ready, _ = ray.wait(waited, num_returns=len(waited), timeout=0)
        heard: list[tuple[int, FromWorker | Lost]] = []
        for reference in ready:
            worker = workers[reference]
            if worker in self._running:
                heard += [(worker, message) for message in self._heard(worker, reference)]
        return heard

    def end(self, worker: int) -> None:
        each = self._running.pop(worker, None)
        if each is not None:
            ray.kill(each.actor)

    def _tell_of_room(self) -> None:
        """Says once, after a while, that no actor has begun, and why."""
        if time.monotonic() < self._tells_at:
            return
        self._tells_at = math.inf
        if not ray.wait([each.node for each in self._running.values()], timeout=0)[0]:
            gpu = " and a GPU" if self._size.num_gpus else ""
            has = {name: ray.cluster_resources().get(name, 0) for name in ("CPU", "GPU")}
            _log.warning(
                "no worker has found room yet: each takes %d cores%s of a node, and the cluster has %g cores and "
                "%g GPUs in all; they begin when there is room",
                self._size.num_cpus, gpu, has["CPU"], has["GPU"],
            )  # fmt: skip

    def _heard(self, worker: int, reference: Any) -> list[FromWorker | Lost]:
        """What an actor has said, or that it is lost."""
        each = self._running[worker]
        try:
            said = ray.get(reference)
        except RayError as error:
            has_crashed = self._is_on_a_living_node(each)
            self.end(worker)
            return [Lost(_in_a_line(error), has_crashed)]
        if reference == each.working:
            # Its last words may be under way.
            each.working = None
            return []
        each.hearing = each.actor.hear.remote()
        return [*said]

    def _is_on_a_living_node(self, each: _Running) -> bool:
        """False as well when it never was on one."""
        try:
            node = ray.get(each.node, timeout=0)
        except (RayError, GetTimeoutError):
            return False
        return any(found["NodeID"] == node and found["Alive"] for found in ray.nodes())


@contextmanager
def ray_actors(address: str | None, num_workers: int, device: DeviceName) -> Iterator[RayActors]:
    """A fleet in the cluster at `address`, or else the one that Ray finds, or else one that is started for it here.

    Raises UsageError when there is none at the address.
    """
    if ray.is_initialized():
        yield RayActors(_size(num_workers, device))
        return
    known = os.environ.get("RAY_ADDRESS")
    with _variables():
        if address is None and known and known != "auto":
            is_local = _connect(known, "RAY_ADDRESS=")
        else:
            is_local = _connect(address, "--ray-address ")
        try:
            size = _size(num_workers, device)
            if is_local and size.num_gpus and not ray.cluster_resources().get("GPU"):
                raise UsageError("--device cuda: there is no GPU here, and no Ray cluster; give --ray-address")
            yield RayActors(size)
        finally:
            ray.shutdown()


@contextmanager
def _variables() -> Iterator[None]:
    """Ray's, within the block."""
    before = {name: os.environ.get(name) for name in _OURS}
    # Nothing of this job is anybody else's business.
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _connect(address: str | None, named_by: str) -> bool:
    """Whether the cluster was started for it, on this machine. Raises UsageError when there is none at the address."""
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        if address is not None:
            _check_answers(address)
            ray.init(address, **quiet)
            return False
        try:
            ray.init("auto", **quiet)
            return False
        except ConnectionError:
            # Its actors are all that there is to do; usually they give way to whatever else the machine runs.
            os.environ.setdefault("RAY_worker_niceness", "0")
            ray.init("local", object_store_memory=_STORE_BYTES, include_dashboard=False, **quiet)
            return True
    except (OSError, RuntimeError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(
            f"{named_by}{address or 'auto'}: no Ray cluster can be used there ({reason}); "
            "run the job on a node of the cluster, and give host:port of its head"
        ) from error
    finally:
        # Ray puts one of its own in their place.
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


def _check_answers(address: str) -> None:
    """Raises OSError when nobody listens there, for which Ray would look for minutes; ValueError when it is none."""
    host, colon, port = address.rpartition(":")
    if "://" in address or (colon and not port.isdigit()):
        raise ValueError("not of the form host:port")
    if colon:
        socket.create_connection((host, int(port)), timeout=_ANSWERS_WITHIN_S).close()


def _size(num_workers: int, device: DeviceName) -> Size:
    """A GPU each where there are any; else so many cores that as many actors as are wanted have room."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if device == "cuda" or (device == "auto" and any(node.get("GPU") for node in nodes)):
        return Size(num_cpus=1, num_gpus=1, num_sharing=1)
    cores = [int(node.get("CPU", 0)) for node in nodes]
    fitting = (num for num in range(max(cores, default=1), 1, -1) if sum(each // num for each in cores) >= num_workers)
    num_cpus = next(fitting, 1)
    return Size(num_cpus, num_gpus=0, num_sharing=max(1, max(cores, default=1) // num_cpus))


def _in_a_line(error: RayError) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
