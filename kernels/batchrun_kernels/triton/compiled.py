"""What a kernel becomes on a target, without having one: Triton compiles it, the tools in its wheel take it apart.

    python -m batchrun_kernels.triton.compiled [--json] [sm_90 ...]

prints a table of all cases of `cases.py` for the targets named, or for all; with --json one object a line. A target
takes a minute, and nothing while its cases' sources stay the same: results are kept beside Triton's own cache. Run it
where TRITON_INTERPRET is not set.
"""

import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from batchrun_kernels.triton.cases import cases
from batchrun_kernels.triton.configs import Architecture
from batchrun_kernels.triton.launch import Launch

_TARGETS: dict[str, GPUTarget] = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_MATRIX = re.compile(r"\b(HGMMA|UTC\w*MMA|HMMA|IMMA|QMMA)\b|\b(v_mfma)_")
_SPILL = re.compile(r"\b(STL|LDL)\b")
_BOX = "cp.async.bulk.tensor"


@dataclass(frozen=True, slots=True)
class Compiled:
    """`spills` counts local stores and loads; on AMD, spilled vector registers. `matrix` counts matrix instructions,
    `boxes` those that fetch boxes, in the PTX.
    """

    target: str
    name: str
    registers: int
    shared_bytes: int
    spills: int
    matrix: dict[str, int]
    boxes: int = 0


def compile_launch(name: str, launch: Launch, target: str) -> Compiled:
    """Compiles the launch as a device of `target` would, with the same specialisation of its arguments."""
    order = {argument: index for index, argument in enumerate(launch.kernel.arg_names)}
    attrs = {(order[argument],): [["tt.divisibility", 16]] for argument in launch.divisible}
    source = ASTSource(launch.kernel, launch.signature, constexprs=dict(launch.folded), attrs=attrs)
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    kernel = triton.compile(source, target=_TARGETS[target], options=options)
    if "amdgcn" in kernel.asm:
        return Compiled(target, name, shared_bytes=kernel.metadata.shared, **_take_apart_amd(kernel.asm["amdgcn"]))
    found = _take_apart_nvidia(kernel.asm["cubin"])
    num_boxes = kernel.asm["ptx"].count(_BOX)
    return Compiled(target, name, shared_bytes=kernel.metadata.shared, boxes=num_boxes, **found)


def compile_target(target: Architecture) -> list[Compiled]:
    """All cases of a target; from the cache if they were compiled by the same Triton from the same sources."""
    kept = Path(knobs.cache.dir) / "batchrun" / f"{target}-{sources()}.json"
    if kept.exists():
        return [Compiled(**report) for report in json.loads(kept.read_text(encoding="utf-8"))]
    reports = [compile_launch(name, launch, target) for name, launch in cases(target)]
    kept.parent.mkdir(parents=True, exist_ok=True)
    fresh = kept.with_suffix(f".{os.getpid()}")
    fresh.write_text(json.dumps([asdict(report) for report in reports]), encoding="utf-8")
    fresh.replace(kept)
    return reports


def sources() -> str:
    """A hash of all that decides what is compiled."""
    here = Path(__file__).parent
    found = hashlib.sha256(importlib.metadata.version("triton").encode())
    for path in [here.parent / "contract.py", *sorted(here.glob("*.py"))]:
        found.update(path.read_bytes())
    return found.hexdigest()[:32]


def _take_apart_nvidia(cubin: bytes) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage, code = _output("cuobjdump", "-res-usage", path), _output("nvdisasm", "-c", path)
    registers = re.search(r"REG:(\d+)", usage)
    assert registers is not None, usage
    return {"registers": int(registers[1]), "spills": len(_SPILL.findall(code)), "matrix": _matrix(code)}


def _take_apart_amd(code: str) -> dict[str, Any]:
    def number(field: str) -> int:
        found = re.search(rf"\.{field}:\s+(\d+)", code)
        assert found is not None, field
        return int(found[1])

    # Spilled scalar registers go to lanes of vector registers, which `vgpr_count` counts; only the latter go to memory.
    return {"registers": number("vgpr_count"), "spills": number("vgpr_spill_count"), "matrix": _matrix(code)}


def _output(tool: str, option: str, path: Path) -> str:
    return subprocess.run([_TOOLS / tool, option, path], check=True, capture_output=True, text=True).stdout


def _matrix(code: str) -> dict[str, int]:
    counts: dict[str, int] = {}
    for one, other in _MATRIX.findall(code):
        kind = one or other
        counts[kind] = counts.get(kind, 0) + 1
    return counts


def main(arguments: list[str]) -> None:
    # Results do not move with Triton's default.
    os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"
    targets = [name for name in arguments if name != "--json"] or list(_TARGETS)
    if "--json" not in arguments:
        print(
            f"{'kernel':40}{'target':7}{'registers':>10}{'shared bytes':>14}{'spills':>7}  matrix instructions, boxes"
        )
    for target in targets:
        for report in compile_target(target):  # type: ignore[arg-type]
            print(json.dumps(asdict(report)) if "--json" in arguments else _line(report), flush=True)


def _line(report: Compiled) -> str:
    matrix = ", ".join(f"{count} {name}" for name, count in report.matrix.items()) or "-"
    numbers = f"{report.registers:10}{report.shared_bytes:14}{report.spills:7}"
    fetched = f", {report.boxes} boxes" if report.boxes else ""
    return f"{report.name:40}{report.target:7}{numbers}  {matrix}{fetched}"


if __name__ == "__main__":
    main(sys.argv[1:])
