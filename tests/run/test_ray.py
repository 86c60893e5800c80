"""Jobs on a Ray cluster of three nodes, which are processes of this machine."""

import importlib.util
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchrun.errors import UsageError
from tests.run.conftest import EchoJob
from tests.run.test_kill import REST, SLOW, committed
from tests.run.test_workers import until

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'batchrun[ray]'"
)
_NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}


class Nodes:
    """The cluster, and its nodes beside the first."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(initialize_head=True, head_node_args={**_NODE, "include_dashboard": False})
        self.others = [self.add() for _ in range(2)]

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add(self) -> Any:
        return self.cluster.add_node(**_NODE)

    def remove_one(self) -> None:
        self.cluster.remove_node(self.others.pop())


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    environment = os.environ.copy()
    # Ray's processes would give way to all others.
    os.environ |= {"RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    nodes = Nodes()
    yield nodes
    nodes.cluster.shutdown()
    os.environ.clear()
    os.environ |= environment


@pytest.fixture
def undisturbed(echo_job: Any, tmp_path: Path) -> EchoJob:
    job: EchoJob = echo_job(800, tmp_path / "undisturbed")
    job.submit(max_tokens=60)
    return job


def on(nodes: Nodes) -> tuple[str, ...]:
    return ("--executor", "ray", "--workers", "3", "--ray-address", nodes.address)


def test_nodes_come_and_go_and_the_result_is_that_of_one_machine(
    echo_job: Any, undisturbed: EchoJob, nodes: Nodes
) -> None:
    job = echo_job(800)
    process = job.start("submit", *SLOW, *on(nodes))
    until(lambda: committed(job) or process.poll() is not None)
    nodes.remove_one()
    nodes.others.append(nodes.add())
    stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr
    assert stdout == f"{job.out}\n"
    assert "ray" not in stderr.lower().replace("--executor ray", "")
    assert "is lost (" in stderr
    assert len(committed(job)) == len({*committed(job)}) == 800
    assert job.result() == undisturbed.result()


def test_a_killed_driver_takes_its_actors_along_and_one_machine_goes_on(
    echo_job: Any, undisturbed: EchoJob, nodes: Nodes
) -> None:
    job = echo_job(800)
    process = job.start("submit", *SLOW, *on(nodes))
    until(lambda: committed(job) or process.poll() is not None)
    process.kill()
    process.communicate()
    assert 0 < len(committed(job)) < 800
    assert job.call("submit", *REST).returncode == 0
    assert job.result() == undisturbed.result()
    # Their places are free again: all three begin.
    other = echo_job(30, job.folder / "other")
    assert other.run("submit", *on(nodes)).returncode == 0


def test_a_drain_reaches_actors(echo_job: Any, undisturbed: EchoJob, nodes: Nodes) -> None:
    job = echo_job(800)
    process = job.start("submit", *SLOW, *on(nodes), "--drain-timeout", "1s")
    until(lambda: committed(job) or process.poll() is not None)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate()
    assert process.returncode == 75, stderr
    assert job.call("submit", *REST).returncode == 0
    assert job.result() == undisturbed.result()


def test_no_cluster_is_said_in_one_line(echo_job: Any) -> None:
    for address, reason in (("127.0.0.1:1", "refused"), ("ray://127.0.0.1:1", "not of the form host:port")):
        ended = echo_job(5).run("submit", "--executor", "ray", "--ray-address", address, "-q")
        assert ended.returncode == 2
        assert ended.stderr.startswith(f"error: --ray-address {address}: no Ray cluster can be used there (")
        assert reason in ended.stderr
        assert ended.stderr.count("\n") == 1


def test_nor_is_one_waited_for_that_a_variable_names(echo_job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    ended = echo_job(5).run("submit", "--executor", "ray", "-q")
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: RAY_ADDRESS=127.0.0.1:1: no Ray cluster can be used there (")


def test_without_ray_it_is_said_what_to_install(echo_job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"pip install 'batchrun\[ray\]'"):
        echo_job(5).submit(executor="ray")
