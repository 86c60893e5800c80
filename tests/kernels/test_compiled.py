"""Every kernel, in every tile of the table, compiles for every target into what the table promises.

No GPU is needed. What was found is kept in pytest's cache under a hash of the kernels' sources, so that this costs
two minutes of one core when a kernel has changed and next to nothing otherwise.
"""

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import batchrun_kernels
from batchrun_kernels.triton.configs import TILES

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
    pytest.mark.timeout(900),
]

# Bytes of shared memory a block may have. sm_80's tiles also serve sm_86 and sm_89, which have the least of all 8.x.
SHARED_BYTES = {"sm_80": 99 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
# The instructions of tensor cores at their full rate, in tiles of at least 64 rows.
WIDE = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA", "gfx942": "v_mfma"}
NARROW = {"sm_80": "HMMA", "sm_90": "HMMA", "sm_100": "HMMA", "gfx942": "v_mfma"}
KERNELS = {"attend", "merge", "write_kv", "rope", "copy_blocks", "add_rms_norm", "silu_mul", "sample", "linear_lse"}

Report = dict[str, Any]


def sources() -> str:
    """A hash of all that decides what is compiled."""
    root = Path(batchrun_kernels.__file__).parent
    found = hashlib.sha256(importlib.metadata.version("triton").encode())
    for path in [root / "contract.py", *sorted((root / "triton").glob("*.py"))]:
        found.update(path.read_bytes())
    return found.hexdigest()[:32]


def compiled(target: str) -> list[Report]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_DEFAULT_FP_FUSION": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "batchrun_kernels.triton.compiled", target]
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest) -> dict[str, list[Report]]:
    """By target; two are compiled at a time."""
    cache = request.config.cache
    assert cache is not None
    key = f"batchrun-kernels/{sources()}"
    found: dict[str, list[Report]] | None = cache.get(key, None)
    if found is None:
        with ThreadPoolExecutor(2) as workers:
            running: dict[str, Future[list[Report]]] = {
                target: workers.submit(compiled, target) for target in SHARED_BYTES
            }
            found = {target: future.result() for target, future in running.items()}
        cache.set(key, found)
    return found


@pytest.mark.parametrize("target", SHARED_BYTES)
def test_kernels_fit_the_target_and_use_its_tensor_cores(reports: dict[str, list[Report]], target: str) -> None:
    names = [report["name"].split() for report in reports[target]]
    assert {kernel for kernel, *_ in names} == KERNELS
    tiles = {(kind, head_dim, tile.rows) for (arch, head_dim, _, kind), tile in TILES.items() if arch == target}
    assert {(rest[0], int(rest[2]), int(rest[1])) for kernel, *rest in names if kernel == "attend"} == tiles
    for report in reports[target]:
        kernel, *rest = report["name"].split()
        assert report["spills"] == 0, report
        assert report["shared_bytes"] <= SHARED_BYTES[target], report
        # No tensor core multiplies float32 to float32's precision.
        if kernel in ("attend", "linear_lse") and "float32" not in rest:
            rows = int(rest[1] if kernel == "attend" else rest[0])
            expected = WIDE if rows >= 64 else NARROW
            assert report["matrix"].get(expected[target], 0) > 0, report
