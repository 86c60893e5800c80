"""What must not be imported, seen from outside in a fresh interpreter."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "transformers", "datasets", "lm_eval"}
SLOW = HEAVY | {"pyarrow", "duckdb", "pydantic", "numpy", "tqdm", "jinja2"}


def modules_after(code: str) -> set[str]:
    """The top-level modules that are loaded when `code` has run and tried to exit."""
    program = f"""
import sys, json
try:
    {code}
except SystemExit as end:
    assert not end.code, end.code
print(json.dumps(sorted({{name.split(".")[0] for name in sys.modules}})))
"""
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(json.loads(result.stdout.splitlines()[-1]))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A job that was created and not run."""
    folder = tmp_path / "out.batchrun"
    folder.mkdir()
    (folder / "job.json").write_text('{"job": {"output_prefix": ""}, "fingerprint": {}}')
    return tmp_path / "out"


def test_importing_the_package_loads_nothing_slow() -> None:
    assert modules_after("import batchrun; dir(batchrun)") & SLOW == set()


def test_names_of_the_package_load_no_torch() -> None:
    code = "import batchrun as br; br.Job, br.SamplingParams, br.plan, br.submit, br.generate"
    assert modules_after(code) & HEAVY == set()


def test_status_loads_nothing_slow(out: Path) -> None:
    code = f"from batchrun.cli import batchrun; batchrun(['status', {str(out)!r}])"
    assert modules_after(code) & SLOW == set()


def test_list_loads_nothing_slow(out: Path) -> None:
    code = f"from batchrun.cli import batchrun; batchrun(['list', {str(out.parent)!r}])"
    assert modules_after(code) & SLOW == set()


def test_report_loads_no_torch(out: Path) -> None:
    code = f"from batchrun.cli import batchrun; batchrun(['report', {str(out)!r}])"
    assert modules_after(code) & HEAVY == set()


def test_a_complete_job_submitted_again_loads_neither_engine_nor_planner_nor_pandas(tmp_path: Path) -> None:
    """Pandas, which pyarrow loads when it makes an array, took half of the time."""
    source, out = tmp_path / "rows.csv", tmp_path / "out"
    source.write_text("prompt\none\ntwo\n")
    submit = (
        f"from batchrun.cli import batchrun; batchrun(['submit', {str(source)!r}, '-o', {str(out)!r}, '-m', 'echo'])"
    )
    assert not modules_after(submit) & HEAVY
    assert out.exists()
    loaded = modules_after(submit)
    assert loaded & (HEAVY | {"pandas", "duckdb", "jinja2", "prometheus_client"}) == set()


@pytest.mark.parametrize("arguments", [["--help"], ["submit", "--help"], ["plan", "--help"]])
def test_help_loads_no_torch(arguments: list[str]) -> None:
    loaded = modules_after(f"from batchrun.cli import batchrun; batchrun({arguments!r})")
    assert loaded & (HEAVY | {"pyarrow", "duckdb"}) == set()


def test_plan_stays_a_function_when_its_package_is_imported() -> None:
    """Importing a submodule puts it where the package's attribute of the same name is."""
    modules_after("import batchrun, batchrun.plan.source; assert callable(batchrun.plan), batchrun.plan")


def test_python_dash_m_is_the_command(tmp_path: Path) -> None:
    arguments = [sys.executable, "-m", "batchrun", "status", str(tmp_path / "none")]
    result = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (66, "")
    assert result.stderr == f"error: no job at {tmp_path}/none.batchrun; batchrun submit creates one\n"
