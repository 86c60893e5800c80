"""Where a plan is cut, and what its files hold."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from batchrun.errors import RowError, StorageFailed
from batchrun.plan.order import OrderedRows
from batchrun.plan.units import MAX_UNIT_ROWS, UNIT_SCHEMA, Unit, UnitWriter, read_unit


def rows(start: int, keep_len: list[int], length: int = 3) -> OrderedRows:
    num_rows = len(keep_len)
    return OrderedRows(
        row_idx=np.arange(start, start + num_rows),
        tokens=np.arange(num_rows * length, dtype=np.int32),
        offsets=np.arange(num_rows + 1) * length,
        keep_len=np.array(keep_len, dtype=np.int32),
        params=[None] * num_rows,
        duplicates=[np.empty(0, dtype=np.int64)] * num_rows,
    )


def cut(folder: Path, keep_len: list[int], unit_tokens: int, step: int) -> list[Unit]:
    """The units of rows that come `step` at a time, each with 3 prompt tokens and one of output."""
    folder.mkdir()
    writer = UnitWriter(folder, unit_tokens)
    for start in range(0, len(keep_len), step):
        part = keep_len[start : start + step]
        writer.add(rows(start, part), np.ones(len(part), dtype=np.int64))
    return writer.finish()


def test_files_hold_the_rows(tmp_path: Path) -> None:
    writer = UnitWriter(tmp_path)
    writer.add_failed([3], [RowError("empty_prompt", "row 3")])
    writer.add(
        OrderedRows(
            row_idx=np.array([7, 1]),
            tokens=np.array([5, 6, 5], dtype=np.int32),
            offsets=np.array([0, 2, 3]),
            keep_len=np.array([1, 0], dtype=np.int32),
            params=[None, '{"seed":1}'],
            duplicates=[np.array([8, 9]), np.array([], dtype=np.int64)],
        ),
        np.array([4, 4]),
    )
    units = writer.finish()
    assert units == [
        Unit(0, tmp_path / "unit-00000.arrow", num_rows=2, num_tokens=3, num_input_rows=4),
        Unit(1, tmp_path / "unit-00001.arrow", num_rows=1, num_tokens=0, num_input_rows=1),
    ]
    assert [read_unit(unit).schema for unit in units] == [UNIT_SCHEMA] * 2
    plain = {"params": None, "duplicates": [], "error": None, "keep_len": 0}
    assert read_unit(units[0]).to_pylist() == [
        plain | {"row_idx": 7, "token_ids": [5, 6], "keep_len": 1, "duplicates": [8, 9]},
        plain | {"row_idx": 1, "token_ids": [5], "params": '{"seed":1}'},
    ]
    error = {"type": "empty_prompt", "message": "row 3"}
    assert read_unit(units[1]).to_pylist() == [plain | {"row_idx": 3, "token_ids": [], "error": error}]


def test_cut_is_where_least_is_shared_near_the_end_of_a_unit(tmp_path: Path) -> None:
    keep_len = [3] * 1000
    keep_len[10], keep_len[290], keep_len[580] = 0, 1, 2
    assert [unit.num_rows for unit in cut(tmp_path / "a", keep_len, unit_tokens=960, step=1000)] == [291, 290, 240, 179]


def test_cuts_do_not_depend_on_how_rows_come_in(tmp_path: Path) -> None:
    keep_len = np.random.default_rng(3).integers(0, 4, 3000).tolist()
    cuts = [[unit.num_rows for unit in cut(tmp_path / str(step), keep_len, 1500, step)] for step in (1, 37, 3000)]
    assert cuts[0] == cuts[1] == cuts[2]
    assert sum(cuts[0]) == 3000
    assert len(cuts[0]) > 3


def test_unit_has_256_rows_unless_they_are_long(tmp_path: Path) -> None:
    short = cut(tmp_path / "short", [0] * 600, unit_tokens=300, step=600)
    assert [unit.num_rows for unit in short][:2] == [204, 204]
    long = cut(tmp_path / "long", [0] * 600, unit_tokens=8, step=600)
    assert max(unit.num_rows for unit in long) <= 8


def test_unit_has_no_more_rows_than_its_limit(tmp_path: Path) -> None:
    units = cut(tmp_path / "a", [0] * (2 * MAX_UNIT_ROWS + 5), unit_tokens=10**9, step=20_000)
    assert max(unit.num_rows for unit in units) <= MAX_UNIT_ROWS
    assert sum(unit.num_rows for unit in units) == 2 * MAX_UNIT_ROWS + 5


def test_failed_rows_are_split_too(tmp_path: Path) -> None:
    writer = UnitWriter(tmp_path)
    num_rows = MAX_UNIT_ROWS + 3
    writer.add_failed(list(range(num_rows)), [RowError("empty_prompt", "x")] * num_rows)
    units = writer.finish()
    assert [unit.num_rows for unit in units] == [MAX_UNIT_ROWS, 3]
    assert read_unit(units[1]).column("row_idx").to_pylist() == [MAX_UNIT_ROWS + number for number in range(3)]


def test_tokens_are_read_without_copying_them(tmp_path: Path) -> None:
    writer = UnitWriter(tmp_path)
    writer.add(rows(0, [0] * 1000, length=500), np.ones(1000, dtype=np.int64))
    (unit,) = writer.finish()
    before = pa.total_allocated_bytes()
    table = read_unit(unit)
    assert table.column("token_ids").chunk(0).values[499].as_py() == 499
    assert pa.total_allocated_bytes() - before < 100_000


def test_damaged_unit_is_named(tmp_path: Path) -> None:
    writer = UnitWriter(tmp_path)
    writer.add(rows(0, [0] * 5), np.ones(5, dtype=np.int64))
    (unit,) = writer.finish()
    with pytest.raises(StorageFailed, match="has 5 rows, not 6"):
        read_unit(Unit(unit.index, unit.path, 6, 0, 6))
    unit.path.write_bytes(unit.path.read_bytes()[:-20])
    with pytest.raises(StorageFailed, match=r"cannot read .*unit-00000\.arrow"):
        read_unit(unit)
    unit.path.unlink()
    with pytest.raises(StorageFailed, match=r"cannot read .*unit-00000\.arrow"):
        read_unit(unit)
