"""Real runs of DAGs by Airflow, on SQLite, in a Python of its own: AIRFLOW_PYTHON names one that has Airflow 3.

The one that runs these tests is taken where it has Airflow itself.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun.store.store import Store

AIRFLOW = os.environ.get("AIRFLOW_PYTHON") or (sys.executable if find_spec("airflow") else None)
pytestmark = [
    pytest.mark.skipif(AIRFLOW is None, reason="needs Airflow: AIRFLOW_PYTHON=/path/to/a/python that has it"),
    pytest.mark.timeout(1200),
]
ROOT = Path(__file__).parents[2]
NUM_ROWS = 4000
RUN = """
import importlib, json, sys
run = importlib.import_module(sys.argv[1]).dag.test(run_conf=json.loads(sys.argv[2]))
print(json.dumps({
    ti.task_id: {"state": ti.state, "tries": ti.try_number, "xcom": ti.xcom_pull(task_ids=ti.task_id)}
    for ti in run.get_task_instances()
}))
"""


@dataclass(frozen=True)
class Ended:
    """What a DAG's tasks came to, by their names, and its log."""

    tasks: dict[str, Any]
    log: str

    def lines(self, *words: str) -> list[str]:
        """Those of the log that have all the words."""
        return [line for line in self.log.splitlines() if all(word in line for word in words)]


@dataclass(frozen=True)
class Airflow:
    """Airflow's Python, with a home and a database of the tests' own."""

    folder: Path

    def start(self, *command: str, dags: Path) -> subprocess.Popen[str]:
        assert AIRFLOW is not None
        variables = {
            "AIRFLOW_HOME": str(self.folder / "home"),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__DAGS_FOLDER": str(dags),
            "PYTHONPATH": os.pathsep.join([str(ROOT / "jobs"), str(dags)]),
            "TRIES_FOLDER": str(self.folder),
            "TRIES_PYTHON": sys.executable,
        }
        return subprocess.Popen(
            [AIRFLOW, *command],
            env=os.environ | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.folder,
        )

    def test(self, module: str, dags: Path, *, hear: Any = lambda line: None, **params: str) -> Ended:
        """`dag.test()` of the module; `hear` gets every line of the log as it comes."""
        with self.start("-c", RUN, module, json.dumps(params), dags=dags) as process:
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                lines.append(line)
                hear(line)
        log = "".join(lines)
        assert process.returncode == 0, log[-4000:]
        return Ended(json.loads(lines[-1]), log)


@pytest.fixture(scope="module")
def airflow(tmp_path_factory: pytest.TempPathFactory) -> Airflow:
    found = Airflow(tmp_path_factory.mktemp("airflow"))
    (found.folder / "no-dags").mkdir()
    with found.start("-m", "airflow", "db", "migrate", dags=found.folder / "no-dags") as process:
        said, _ = process.communicate()
    assert process.returncode == 0, said[-4000:]
    return found


@pytest.fixture(scope="module")
def tries(airflow: Airflow) -> Iterator[Ended]:
    """The DAG of tries, beside a process that holds two of the jobs: one until its task has failed for that."""
    prompts = [f"What of {number}?" for number in range(NUM_ROWS)]
    pq.write_table(pa.table({"prompt": prompts}), airflow.folder / "input.parquet")
    with ExitStack() as held, ExitStack() as waited_for:
        held.enter_context(Store.open(airflow.folder / "held").lock())
        waited_for.enter_context(Store.open(airflow.folder / "waits").lock())

        def hear(line: str) -> None:
            if "batchrun exited 75; error:" in line and "held is held by process" in line:
                held.close()
            if "running [" in line and "/waits'" in line:
                threading.Timer(5.0, waited_for.close).start()

        yield airflow.test("tries", ROOT / "tests" / "jobs" / "dags", hear=hear)


def ending(ended: Ended, task: str) -> tuple[str, int]:
    return ended.tasks[task]["state"], ended.tasks[task]["tries"]


def test_the_xcom_is_the_summary(tries: Ended, airflow: Airflow) -> None:
    assert ending(tries, "complete") == ("success", 1)
    summary = tries.tasks["complete"]["xcom"]
    assert (summary["rows"], summary["failed"], summary["max_error_rate"]) == (63, 0, 0.1)
    assert summary["output"] == str(airflow.folder / "complete")
    assert pq.read_table(airflow.folder / "complete").num_rows == 63


def test_what_a_retry_cannot_mend_fails_at_once(tries: Ended) -> None:
    assert ending(tries, "bad_column") == ("failed", 1)
    assert tries.lines("AirflowFailException: batchrun exited 65; error: --prompt-col: the input has no column 'promt'")
    assert ending(tries, "own_option") == ("failed", 1)
    assert tries.lines("AirflowFailException: options: wait-lock is set by the operator")


def test_what_the_task_wants_skipped_is_skipped(tries: Ended) -> None:
    assert ending(tries, "nothing_new") == ("skipped", 1)


def test_a_try_that_times_out_drains_and_the_next_goes_on(tries: Ended, airflow: Airflow) -> None:
    state, num_tries = ending(tries, "timed_out")
    assert state == "success"
    assert num_tries > 1
    assert tries.lines("AirflowTaskTimeout: Timeout")
    assert tries.lines("asking process", "it may drain for 45 s")
    assert tries.lines("error: stopped by SIGTERM:", f"of {NUM_ROWS:,} rows are committed")
    summary = tries.tasks["timed_out"]["xcom"]
    assert (summary["rows"], summary["failed"]) == (NUM_ROWS, 0)
    assert summary["prompt_tokens"] < tries_prompt_tokens(airflow), "the last try has computed what an earlier one had"
    answered = pq.read_table(airflow.folder / "timed_out")
    assert answered.column("row_idx").to_pylist() == [*range(NUM_ROWS)]
    assert answered.column("text").null_count == 0


def tries_prompt_tokens(airflow: Airflow) -> int:
    """Of all rows."""
    return sum(pq.read_table(airflow.folder / "timed_out").column("prompt_tokens").to_pylist())


def test_a_job_that_is_held_is_tried_again(tries: Ended) -> None:
    state, num_tries = ending(tries, "held")
    assert (state, num_tries > 1) == ("success", True)
    assert tries.tasks["held"]["xcom"]["rows"] == NUM_ROWS


def test_a_task_waits_for_the_lock(tries: Ended) -> None:
    assert ending(tries, "waits") == ("success", 1)
    assert tries.tasks["waits"]["xcom"]["rows"] == NUM_ROWS


def test_the_template_runs(airflow: Airflow) -> None:
    pq.write_table(pa.table({"review": ["Good.", "Bad."], "stars": [5, 1]}), airflow.folder / "export.parquet")
    params = {"folder": str(airflow.folder), "python": sys.executable, "model": "echo"}
    ended = airflow.test("nightly_dag", ROOT / "jobs" / "templates", **params)
    assert (ending(ended, "classify"), ending(ended, "summarise")) == (("success", 1), ("success", 1))
    summary = ended.tasks["summarise"]["xcom"]
    assert (summary["rows"], summary["failed"]) == (2, 0)
    answered = pq.read_table(summary["output"])
    assert {"review", "label", "text"} <= {*answered.column_names}
