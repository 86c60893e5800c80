"""Small jobs on the model `echo`, planned in a temporary folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun.job import Job
from batchrun.model_spec import ModelSpec
from batchrun.plan.plan import Plan, read_unit
from batchrun.plan.planner import make_plan
from batchrun.plan.source import expand
from batchrun.tokenizer import EchoTokenizer

SPEC = ModelSpec(
    name="echo", architecture="Echo", kv_layers=1, num_kv_heads=1, head_dim=1, vocab_size=259,
    max_model_len=1000, eos_token_ids=(2,), digest="echo",
)  # fmt: skip


@pytest.fixture
def spec() -> ModelSpec:
    return SPEC


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., Job]:
    """A job with the fields given and no input worth reading."""

    def make(**fields: Any) -> Job:
        return Job(**{"inputs": (str(tmp_path),), "output": str(tmp_path / "out"), **fields})

    return make


@pytest.fixture
def planned(tmp_path: Path) -> Callable[..., Plan]:
    """Plans a table with the job's fields given, on the model `echo`."""

    def make(table: pa.Table, **fields: Any) -> Plan:
        path = tmp_path / "input.parquet"
        pq.write_table(table, path)
        job = Job(inputs=(str(path),), output=str(tmp_path / "out"), **fields)
        return make_plan(job, expand(job.inputs), EchoTokenizer(), SPEC, tmp_path / "plan")

    return make


@pytest.fixture
def rows_of() -> Callable[[Plan], list[dict[str, Any]]]:
    """All rows of a plan's units, in plan order."""
    return lambda plan: [row for unit in plan.units for row in read_unit(unit).to_pylist()]
