"""The house keeps its shape: who may import whom, and which names exist at the top."""

import ast
import importlib.util
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from setuptools import find_namespace_packages

ROOT = Path(__file__).parents[1]

# A module belongs to the first room with a matching name, itself or a package above it.
ROOMS = {
    "base": (
        "child errors engine.grammar engine.request engine.statistics latency leases model_spec job job_rules "
        "option_types presets settings nearest stop outcome watchdog"
    ),
    "engine core": (
        "engine.admission engine.allowed engine.beam_rows engine.beams engine.blocks engine.block_manager "
        "engine.echo engine.endings engine.handover engine.host_memory engine.isolation engine.lane engine.lengths "
        "engine.next_step engine.policies engine.preemption engine.radix engine.repetition engine.running "
        "engine.scheduler engine.sequence engine.speculation engine.step engine.step_time engine.stopwatch"
    ),
    "model files": "checkpoint conversion digest divisible grammars imports quiet schema_keywords tokenizer",
    "job side": "filesystem plan store tasks observe report frames reuse pending tally ledger",
    "engine": "engine",
    "worker": "worker",
    "top": (
        "cores executors harness interrupts lifecycle opened planning running progress_file recall api doctor tune "
        "retry rerun"
    ),
    "front": (
        "cli cli_cancel cli_export cli_list cli_lm_eval cli_options cli_presets cli_report cli_retry "
        "cli_run cli_signals cli_status cli_text cli_tune exit __main__ __init__"
    ),
}
MAY_IMPORT = {
    "base": {"base"},
    "engine core": {"base", "engine core"},
    "model files": {"base", "model files"},
    "job side": {"base", "model files", "job side"},
    "engine": {"base", "engine core", "model files", "engine", "kernels"},
    "worker": {"base", "engine core", "job side", "engine"},
    "top": {"base", "engine core", "model files", "job side", "engine", "worker", "top", "kernels"},
    "front": {"base", "job side", "top", "front"},
    "kernels": {"kernels"},
}
NEVER = {
    "base": {"torch", "transformers", "pyarrow", "duckdb", "click", "ray"},
    "engine core": {"torch", "transformers", "pyarrow", "duckdb", "click", "ray", "time", "random", "datetime"},
    "model files": {"torch", "click", "ray"},
    "job side": {"torch", "click", "ray"},
    "engine": {"pyarrow", "duckdb", "datasets", "click", "ray"},
    "worker": {"torch", "click", "ray"},
    "top": {"click"},
    "front": {"torch", "transformers"},
    "kernels": {"transformers", "pyarrow", "click", "ray"},
}
# Beside the standard library.
ONLY = {"engine core": {"numpy"}, "kernels": {"numpy", "torch", "triton"}}


def modules() -> dict[str, Path]:
    """Every module of ours by its import name; a package is `name.__init__`."""
    found = {}
    for top in (ROOT / "batchrun", ROOT / "kernels" / "batchrun_kernels"):
        for path in top.rglob("*.py"):
            found[".".join(path.relative_to(top.parent).with_suffix("").parts)] = path
    return found


MODULES = modules()


def room(module: str) -> str:
    if module.startswith("batchrun_kernels"):
        return "kernels"
    name = module.removeprefix("batchrun.")
    for title, members in ROOMS.items():
        if any(name == member or name.startswith(member + ".") for member in members.split()):
            return title
    raise AssertionError(f"{module} is in no room: add it to ROOMS")


def imports(path: Path) -> Iterator[str]:
    """Everything a file imports anywhere in it; `from package import module` as the module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if {inner, f"{inner}.__init__"} & set(MODULES) else str(node.module)


def is_ours(name: str) -> bool:
    return name.split(".")[0] in ("batchrun", "batchrun_kernels", "batchrun_jobs")


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_point_down(module: str) -> None:
    own = room(module)
    # `batchrun` itself, that is its version, is everybody's.
    ours = {name for name in imports(MODULES[module]) if is_ours(name) and name != "batchrun"}
    assert {name: room(name) for name in ours if room(name) not in MAY_IMPORT[own]} == {}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_foreign_imports_stay_in_their_rooms(module: str) -> None:
    own = room(module)
    foreign = {name.split(".")[0] for name in imports(MODULES[module]) if not is_ours(name)}
    assert foreign & NEVER[own] == set()
    if own in ONLY:
        assert foreign - set(sys.stdlib_module_names) <= ONLY[own]


def test_status_and_list_need_the_standard_library_and_click_only() -> None:
    """What they import, followed through our own modules at their top level."""
    seen: set[str] = set()
    foreign: set[str] = set()
    waiting = ["batchrun.cli", "batchrun.cli_status", "batchrun.cli_list"]
    while waiting:
        module = waiting.pop()
        seen.add(module)
        for name in top_level_imports(MODULES[module]):
            if not is_ours(name):
                foreign.add(name.split(".")[0])
            elif name in MODULES and name not in seen:
                waiting.append(name)
    assert foreign - set(sys.stdlib_module_names) == {"click"}


def top_level_imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def test_outer_folders_are_no_packages() -> None:
    """A top-level module called `kernels` would shadow the PyPI package that transformers imports."""
    for folder in ("kernels", "jobs"):
        assert not (ROOT / folder / "__init__.py").exists()
    code = "import importlib.util as u; print([getattr(u.find_spec(n), 'origin', None) for n in ('kernels', 'jobs')])"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[None, None]"


def test_distribution_has_three_top_level_names() -> None:
    find = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    found = {
        package.split(".")[0]
        for where in find["where"]
        for package in find_namespace_packages(str(ROOT / where), include=find["include"])
    }
    assert found == {"batchrun", "batchrun_kernels", "batchrun_jobs"}


def test_every_import_of_ours_exists() -> None:
    """A typing-only or lazy import of a module that was renamed fails nowhere else."""
    for module, path in MODULES.items():
        for name in imports(path):
            if is_ours(name):
                assert importlib.util.find_spec(name) is not None, f"{module} imports {name}"
