"""Every kernel, in every tile of the table, compiles for every target into what the table promises.

No GPU is needed. What was found is kept under a hash of the kernels' sources, so that this costs two minutes of one
core when a kernel has changed and next to nothing otherwise.
"""

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest

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
KERNELS = {"attend", "merge", "write_kv", "rope", "copy_blocks", "add_rms_norm", "glu", "sample", "linear_lse"}

Report = dict[str, Any]


def compiled(target: str) -> list[Report]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-m", "batchrun_kernels.triton.compiled", "--json", target]
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.mark.parametrize("target", SHARED_BYTES)
def test_kernels_fit_the_target_and_use_its_tensor_cores(target: str) -> None:
    reports = compiled(target)
    names = [report["name"].split() for report in reports]
    assert {kernel for kernel, *_ in names} == KERNELS
    tiles = {(kind, head_dim, tile.rows) for (arch, head_dim, _, kind), tile in TILES.items() if arch == target}
    assert {(rest[0], int(rest[2]), int(rest[1])) for kernel, *rest in names if kernel == "attend"} == tiles
    boxed = {(kind, dim) for (arch, dim, _, kind), tile in TILES.items() if arch == target and tile.reads_runs}
    assert {(rest[0], int(rest[2])) for kernel, *rest in names if kernel == "attend" and "boxes" in rest} == boxed
    for report in reports:
        kernel, *rest = report["name"].split()
        assert report["spills"] == 0, report
        assert report["shared_bytes"] <= SHARED_BYTES[target], report
        # Otherwise the accelerator would not be what fetches them.
        assert (report["boxes"] > 0) == ("boxes" in rest), report
        # No tensor core multiplies float32 to float32's precision.
        if kernel in ("attend", "linear_lse") and "float32" not in rest:
            rows = int(rest[1] if kernel == "attend" else rest[0])
            expected = WIDE if rows >= 64 else NARROW
            assert report["matrix"].get(expected[target], 0) > 0, report
