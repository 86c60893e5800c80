"""Sums over slices say the same as the rows, wherever units and slices are cut."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from batchrun.engine.request import SamplingParams
from batchrun.plan import units
from batchrun.plan.plan import Plan, read_unit
from batchrun.tune import slices as subject
from batchrun.tune.imagined import Outputs
from batchrun.tune.slices import read_slices
from tests.run.conftest import echo_job as echo_job
from tests.tune.test_fleet import MakeJob, planned

LONGEST = 150


@pytest.mark.parametrize("most_slices", [1, 7, 1000])
def test_slices_are_sums_over_their_rows(
    echo_job: MakeJob, monkeypatch: pytest.MonkeyPatch, most_slices: int, cache: Path
) -> None:
    """Of rows with outputs of their own, in many units; prompts of the last unit have failed."""
    monkeypatch.setattr(units, "MIN_UNIT_ROWS", 11)
    monkeypatch.setattr(units.UnitWriter.__init__, "__defaults__", (2000,))
    monkeypatch.setattr(subject, "_MOST_SLICES", most_slices)
    plan = planned(echo_job(150), max_tokens=60)
    assert len(plan.units) > 3
    found = read_slices(plan, Outputs(SamplingParams(max_tokens=60, ignore_eos=True), LONGEST))
    lengths, shared, size = _rows(plan)
    outputs = np.minimum(60, LONGEST - lengths)
    for number, start in enumerate(range(0, len(lengths), size)):
        rows = slice(start, start + size)
        alone = lengths[rows].sum() - shared[rows][1:].sum()
        assert found.num_rows[number] == len(lengths[rows])
        assert found.prompt_tokens[number] == lengths[rows].sum()
        assert found.alone_tokens[number] == alone
        assert found.shared_len[number] == shared[start]
        assert found.least_shared[number] == shared[rows].min()
        assert found.output_tokens[number] == outputs[rows].sum()
        assert found.longest_output[number] == outputs[rows].max()
    assert found.prompt_work.sum() == plan.summary.unique_prompt_tokens
    assert len(found.num_rows) <= most_slices


def _rows(plan: Plan) -> tuple[np.ndarray, np.ndarray, int]:
    table = pa.concat_tables([read_unit(unit) for unit in plan.units if unit.num_tokens])
    lengths = np.array([len(tokens) for tokens in table.column("token_ids").to_pylist()])
    shared = np.concatenate([[0], table.column("keep_len").to_numpy()[:-1]])
    return lengths, shared, -(-len(lengths) // subject._MOST_SLICES)
