"""What a kernel becomes on a target, without having one: Triton compiles it, the tools in its wheel take it apart.

    python -m batchrun_kernels.triton.compiled sm_90

prints one JSON object a line, one for each case of `cases.py`. Run it where TRITON_INTERPRET is not set, with
TRITON_DEFAULT_FP_FUSION=1, so that the numbers do not move with Triton's default.
"""

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import triton
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


@dataclass(frozen=True, slots=True)
class Compiled:
    """`spills` counts local stores and loads; on AMD, spilled vector registers. `matrix` counts matrix instructions."""

    name: str
    registers: int
    shared_bytes: int
    spills: int
    matrix: dict[str, int]


def compile_launch(name: str, launch: Launch, target: str) -> Compiled:
    """Compiles the launch as a device of `target` would, with the same specialisation of its arguments."""
    order = {argument: index for index, argument in enumerate(launch.kernel.arg_names)}
    attrs = {(order[argument],): [["tt.divisibility", 16]] for argument in launch.divisible}
    source = ASTSource(launch.kernel, launch.signature, constexprs=dict(launch.folded), attrs=attrs)
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    kernel = triton.compile(source, target=_TARGETS[target], options=options)
    if "amdgcn" in kernel.asm:
        return _take_apart_amd(name, kernel.asm["amdgcn"], kernel.metadata.shared)
    return _take_apart_nvidia(name, kernel.asm["cubin"], kernel.metadata.shared)


def _take_apart_nvidia(name: str, cubin: bytes, shared_bytes: int) -> Compiled:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage, code = _output("cuobjdump", "-res-usage", path), _output("nvdisasm", "-c", path)
    registers = re.search(r"REG:(\d+)", usage)
    assert registers is not None, usage
    return Compiled(name, int(registers[1]), shared_bytes, len(_SPILL.findall(code)), _matrix(code))


def _take_apart_amd(name: str, code: str, shared_bytes: int) -> Compiled:
    def number(field: str) -> int:
        found = re.search(rf"\.{field}:\s+(\d+)", code)
        assert found is not None, field
        return int(found[1])

    # Spilled scalar registers go to lanes of vector registers, which `vgpr_count` counts; only the latter go to memory.
    return Compiled(name, number("vgpr_count"), shared_bytes, number("vgpr_spill_count"), _matrix(code))


def _output(tool: str, option: str, path: Path) -> str:
    return subprocess.run([_TOOLS / tool, option, path], check=True, capture_output=True, text=True).stdout


def _matrix(code: str) -> dict[str, int]:
    counts: dict[str, int] = {}
    for one, other in _MATRIX.findall(code):
        kind = one or other
        counts[kind] = counts.get(kind, 0) + 1
    return counts


def main(architecture: Architecture) -> None:
    for name, launch in cases(architecture):
        print(json.dumps(asdict(compile_launch(name, launch, architecture))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])  # type: ignore[arg-type]
