"""The tests of the Triton kernels without the interpreter: the same files, on the GPU, in every dtype they name."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.gpu.part import Machine, Part, Result

_ROOT = Path(__file__).parents[2]
_FOLDER = _ROOT / "tests" / "kernels" / "interpreted"
# Compiling is most of the time: the tests of attention are shared out among several processes.
_SPLIT = {"test_attend.py": ("float32", "float16 and not bfloat16", "bfloat16", "not float16 and not float32")}

# The project's configuration and its other conftests want plugins that the machine may lack.
_ALONE = ("-q", "--no-header", "-p", "no:cacheprovider", "--import-mode=importlib", "-c", os.devnull)
_ALONE += (f"--rootdir={_ROOT}", f"--confcutdir={_FOLDER}")


def shards() -> list[tuple[str, list[str]]]:
    """A name and pytest's arguments, for each process."""
    found = []
    for path in sorted(_FOLDER.glob("test_*.py")):
        for words in _SPLIT.get(path.name, ("",)):
            found.append((f"{path.name} {words}".strip(), [str(path), *(["-k", words] if words else [])]))
    return found


def plan() -> Iterator[str]:
    for name, _ in shards():
        yield f"pytest {name}, on the GPU, without the interpreter"


def run(machine: Machine) -> Iterator[Result]:
    if not machine.is_gpu:
        yield Result("suite", "pytest", True, "not run here: tests/kernels/test_interpreted.py runs the same files")
        return
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(map(str, (_ROOT, _ROOT / "kernels")))
    command = [sys.executable, "-m", "pytest", *_ALONE]
    running = [
        (name, subprocess.Popen([*command, *chosen], cwd=_ROOT, env=env, stdout=subprocess.PIPE, text=True))
        for name, chosen in shards()
    ]
    for name, process in running:
        said, _ = process.communicate()
        lines = said.strip().splitlines() or ["no output"]
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        yield Result("suite", name, process.returncode == 0, " | ".join([lines[-1], *failed[:8]]))


PART = Part("suite", "the kernels' tests, compiled for this GPU", 150, plan, run)
