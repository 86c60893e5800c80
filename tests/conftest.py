"""How all tests are run: examples that are made up are the same in every run, and slow machines have time for them."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.s3 import S3, running

# The workers of pytest-xdist share the cores, with every process that they start; torch asks when it is imported.
if num_workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
    os.environ["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // num_workers))

settings.register_profile("steady", deadline=None, derandomize=True)
settings.load_profile("steady")


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3]:
    with running() as server:
        yield server


@pytest.fixture
def s3(s3_server: S3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> S3:
    """A store on loopback with an empty bucket `lake`, found through the environment."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    s3_server.spoil = None
    if "lake" not in {bucket["Name"] for bucket in s3_server.client.list_buckets()["Buckets"]}:
        s3_server.client.create_bucket(Bucket="lake")
    for key in s3_server.keys("lake"):
        s3_server.client.delete_object(Bucket="lake", Key=key)
    s3_server.requests.clear()
    return s3_server


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Two at least, among which a kernel divides its work, also where a worker has one core."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(max(2, before))
    yield
    torch.set_num_threads(before)
