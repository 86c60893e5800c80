"""Units: contiguous slices of the plan, one Arrow file each, the grain in which work is handed out and committed.

Owns where the plan is cut and the files' schema. Knows nothing of how rows came into their order.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchrun.errors import RowError, StorageFailed

if TYPE_CHECKING:
    from batchrun.plan.order import OrderedRows

# A failed row has no tokens and its error; such rows are in units of their own, after all others.
UNIT_SCHEMA = pa.schema(
    [
        pa.field("row_idx", pa.int64(), nullable=False),
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("keep_len", pa.int32(), nullable=False),
        pa.field("params", pa.string()),
        pa.field("duplicates", pa.list_(pa.int64()), nullable=False),
        pa.field("error", pa.struct([("type", pa.string()), ("message", pa.string())])),
    ]
)
MAX_UNIT_ROWS = 65_536
MIN_UNIT_ROWS = 256
# Prompt and output tokens: minutes of work for a fast device.
UNIT_TOKENS = 4 << 20
_BATCH_ROWS = 8192


@dataclass(frozen=True, slots=True)
class Unit:
    """One file of the plan: `num_rows` requests of `num_tokens` prompt tokens that answer `num_input_rows` rows."""

    index: int
    path: Path
    num_rows: int
    num_tokens: int
    num_input_rows: int


class UnitWriter:
    """Cuts rows in plan order into units as they come, and writes them."""

    def __init__(self, folder: Path, unit_tokens: int = UNIT_TOKENS) -> None:
        """Files go to `folder`, which exists; a unit has about `unit_tokens` of prompt and output."""
        self._folder = folder
        self._unit_tokens = unit_tokens
        self._pending: list[pa.RecordBatch] = []
        self._keep_len = np.empty(0, dtype=np.int32)
        self._work = np.empty(0, dtype=np.int64)
        self._units: list[Unit] = []
        self._failed = _FailedRows(folder)

    def add(self, rows: "OrderedRows", output_len: NDArray[np.int64]) -> None:
        """The next rows of the plan; `output_len` [num_rows] is how many tokens each may generate."""
        self._pending.append(_unit_batch(rows))
        self._keep_len = np.concatenate([self._keep_len, rows.keep_len])
        self._work = np.concatenate([self._work, rows.lengths + output_len])
        while cut := self._cut():
            self._write(cut)

    def add_failed(self, row_idx: list[int], errors: list[RowError]) -> None:
        """Rows that failed in planning, in input order; may be mixed with `add` in any way."""
        self._failed.add(row_idx, errors)

    def finish(self) -> list[Unit]:
        """Writes what is left; all units in plan order, those of failed rows last."""
        if len(self._work):
            self._write(len(self._work))
        for path, num_rows in self._failed.finish():
            target = self._path(len(self._units))
            path.rename(target)
            self._units.append(Unit(len(self._units), target, num_rows, 0, num_rows))
        return self._units

    def _cut(self) -> int:
        """How many pending rows the next unit takes, 0 when that is not known yet.

        The best place in the last fifth of the largest unit allowed: where the least is shared. Depends on the rows
        alone, not on how they came in.
        """
        done = np.cumsum(self._work)
        full = _rows_until(done, self._unit_tokens + self._unit_tokens // 4)
        few = min(MIN_UNIT_ROWS, _rows_until(done, 4 * self._unit_tokens))
        longest = min(max(full, few), MAX_UNIT_ROWS)
        if longest > len(done):
            return 0
        shortest = max(longest * 4 // 5, 1)
        return shortest + int(np.argmin(self._keep_len[shortest - 1 : longest]))

    def _write(self, num_rows: int) -> None:
        pending = pa.Table.from_batches(self._pending)
        table = pending.slice(0, num_rows)
        self._pending = pending.slice(num_rows).to_batches()
        self._keep_len, self._work = self._keep_len[num_rows:], self._work[num_rows:]
        path = self._path(len(self._units))
        self._units.append(write_unit(table, len(self._units), path))

    def _path(self, index: int) -> Path:
        return self._folder / unit_name(index)


def unit_name(index: int) -> str:
    """The name of a unit's file."""
    return f"unit-{index:05d}.arrow"


def write_unit(table: pa.Table, index: int, path: Path) -> Unit:
    """Writes rows (`UNIT_SCHEMA`) as the unit of this index. Raises OSError."""
    _write_table(table, path)
    num_tokens = sum(len(chunk.flatten()) for chunk in table.column("token_ids").chunks)
    num_duplicates = sum(len(chunk.flatten()) for chunk in table.column("duplicates").chunks)
    return Unit(index, path, len(table), num_tokens, len(table) + num_duplicates)


def read_unit(unit: Unit) -> pa.Table:
    """The unit's rows (`UNIT_SCHEMA`), mapped from the file rather than copied.

    Raises:
        StorageFailed: the file is missing or damaged.
    """
    try:
        with pa.memory_map(str(unit.path)) as mapped:
            table = pa.ipc.open_file(mapped).read_all()
    except (OSError, pa.ArrowException) as error:
        raise StorageFailed(f"cannot read {unit.path} ({error}); plan again with --overwrite") from error
    if len(table) != unit.num_rows:
        raise StorageFailed(f"{unit.path} has {len(table)} rows, not {unit.num_rows}; plan again with --overwrite")
    return table


class _FailedRows:
    """Writes failed rows to files of at most `MAX_UNIT_ROWS`, to be numbered when the other units are known."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._row_idx: list[int] = []
        self._errors: list[RowError] = []
        self._files: list[tuple[Path, int]] = []

    def add(self, row_idx: list[int], errors: list[RowError]) -> None:
        self._row_idx += row_idx
        self._errors += errors
        while len(self._row_idx) >= MAX_UNIT_ROWS:
            self._write(MAX_UNIT_ROWS)

    def finish(self) -> list[tuple[Path, int]]:
        """The files with their numbers of rows, in input order."""
        if self._row_idx:
            self._write(len(self._row_idx))
        return self._files

    def _write(self, num_rows: int) -> None:
        path = self._folder / f"failed-{len(self._files):05d}.arrow"
        errors = [{"type": error.type, "message": error.message} for error in self._errors[:num_rows]]
        columns = {
            "row_idx": self._row_idx[:num_rows],
            "token_ids": [[]] * num_rows,
            "keep_len": [0] * num_rows,
            "params": [None] * num_rows,
            "duplicates": [[]] * num_rows,
            "error": errors,
        }
        _write_table(pa.table(columns, schema=UNIT_SCHEMA), path)
        self._files.append((path, num_rows))
        self._row_idx, self._errors = self._row_idx[num_rows:], self._errors[num_rows:]


def _unit_batch(rows: "OrderedRows") -> pa.RecordBatch:
    none = np.empty(0, dtype=np.int64)
    ends = np.cumsum([0, *map(len, rows.duplicates)])
    columns = [
        pa.array(rows.row_idx),
        pa.ListArray.from_arrays(pa.array(rows.offsets, pa.int32()), pa.array(rows.tokens)),
        pa.array(rows.keep_len),
        pa.array(rows.params, pa.string()),
        pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(np.concatenate([none, *rows.duplicates]))),
        pa.nulls(len(rows.row_idx), UNIT_SCHEMA.field("error").type),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=UNIT_SCHEMA)


def _rows_until(done: NDArray[np.int64], work: int) -> int:
    """Rows that it takes to reach `work`; one more than there are when they do not."""
    return int(np.searchsorted(done, work)) + 1


def _write_table(table: pa.Table, path: Path) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, UNIT_SCHEMA) as stream:
        stream.write_table(table, max_chunksize=_BATCH_ROWS)
