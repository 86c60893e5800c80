"""Plans of which some rows are taken out: what is left still says what neighbours share."""

from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from batchrun.plan import units
from batchrun.plan.plan import Plan, read_unit
from batchrun.plan.prefixes import read_prefixes
from batchrun.plan.replace import keep_rows, replace_rows
from batchrun.tokenizer import EchoTokenizer
from tests.plan.test_plan import Planned

NUM_ROWS = 63


@pytest.fixture
def plan(planned: Planned, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Rows behind three instructions, in several units."""
    monkeypatch.setattr(units, "MIN_UNIT_ROWS", 5)
    monkeypatch.setattr(units.UnitWriter.__init__, "__defaults__", (300,))
    prompts = [f"Instruction {row % 3} is long. What of {row}?" for row in range(NUM_ROWS)]
    made = planned(pa.table({"prompt": prompts}))
    assert len(made.units) > 5
    return made


def rows_of(plan: Plan) -> list[dict[str, Any]]:
    return [row for unit in plan.units for row in read_unit(unit).to_pylist()]


def common(one: list[int], other: list[int]) -> int:
    return next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))


def is_true(plan: Plan) -> bool:
    """Whether every row shares with the next what its unit says, and the last one nothing."""
    rows = rows_of(plan)
    shared = [common(one["token_ids"], other["token_ids"]) for one, other in pairwise(rows)]
    return [row["keep_len"] for row in rows] == [*shared, 0]


@pytest.mark.parametrize("gone", [[1], [2, 3], [0], [-1], [-2, -1], [0, -1], [1, 3]])
def test_rows_share_with_the_next_that_is_left_where_whole_units_go(plan: Plan, tmp_path: Any, gone: list[int]) -> None:
    """The last row of the unit before went on to say what it shared with a row that was no longer there."""
    assert is_true(plan)
    taken = np.concatenate([read_unit(plan.units[at]).column("row_idx").to_numpy() for at in gone])
    (tmp_path / "left").mkdir()
    left = keep_rows(plan, np.setdiff1d(np.arange(NUM_ROWS), taken), tmp_path / "left")
    assert is_true(left)
    assert left.summary.num_rows == left.summary.num_unique == NUM_ROWS - len(taken)
    lengths = [len(row["token_ids"]) for row in rows_of(left)]
    assert left.summary.prompt_tokens == sum(lengths)
    assert left.summary.saved_tokens == sum(row["keep_len"] for row in rows_of(left))


def test_a_plan_with_replaced_rows_has_a_map_of_its_prefixes(plan: Plan, tmp_path: Any) -> None:
    """There was none after a retry."""
    (tmp_path / "fresh").mkdir()
    (tmp_path / "next").mkdir()
    again = np.arange(0, NUM_ROWS, 9)
    fresh = keep_rows(plan, again, tmp_path / "fresh")
    tokenizer = EchoTokenizer()
    replaced = replace_rows(plan, again, fresh, tmp_path / "next", tokenizer.decode)
    assert sorted(row["row_idx"] for row in rows_of(replaced)) == list(range(NUM_ROWS))
    before, after = read_prefixes(plan.folder), read_prefixes(replaced.folder)
    num_left = [sum(prefix.num_rows for prefix in each if "Instruction" in prefix.text) for each in (before, after)]
    assert num_left == [NUM_ROWS, NUM_ROWS]
    assert {prefix.text for prefix in before if prefix.level == 1} <= {prefix.text for prefix in after}
