"""The rows of a plan that are in no part yet, and how they are handed to whoever runs them.

Owns what a row needs to be run anywhere: its tokens, what it shares, and what it generated before. Knows no engine.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from batchrun.errors import RowError
from batchrun.plan.plan import Plan, read_unit
from batchrun.plan.units import UNIT_SCHEMA
from batchrun.store.store import Store
from batchrun.tasks.generate import PlannedRow

_SHARED_LEN = pa.field("shared_len", pa.int32(), nullable=False)
PENDING_SCHEMA = UNIT_SCHEMA.append(_SHARED_LEN)
_BATCH_ROWS = 256  # made into objects at a time


@dataclass(frozen=True, slots=True)
class LeasedRow:
    """A row of a unit to run. It goes on behind `output_ids`; `num_given_up` processes ended while it ran."""

    unit: int
    row: PlannedRow
    output_ids: tuple[int, ...] = ()
    num_given_up: int = 0


@dataclass(frozen=True, slots=True)
class PendingUnit:
    """A unit's rows that are in no part yet, by their `positions` in its table, ascending.

    `shared_len` is what each shares with the row before it in the plan, `keep_len` with the next one that is pending.
    """

    index: int
    table: pa.Table  # UNIT_SCHEMA
    positions: NDArray[np.int64]  # [num_pending]
    shared_len: NDArray[np.int32]  # [num_pending]
    keep_len: NDArray[np.int32]  # [num_pending]

    @property
    def row_idx(self) -> NDArray[np.int64]:
        """Of the pending rows."""
        found: NDArray[np.int64] = self.table.column("row_idx").to_numpy()[self.positions]
        return found

    @property
    def prompt_len(self) -> NDArray[np.int64]:
        """Tokens of each pending row's prompt."""
        lengths = pc.list_value_length(self.table.column("token_ids")).to_numpy()
        return np.asarray(lengths[self.positions], dtype=np.int64)

    def rows(self, which: NDArray[np.int64]) -> pa.Table:
        """Some of the pending rows, by their place among these; `PENDING_SCHEMA`."""
        rows = self.table.take(self.positions[which])
        at = UNIT_SCHEMA.get_field_index("keep_len")
        rows = rows.set_column(at, UNIT_SCHEMA.field(at), pa.array(self.keep_len[which]))
        return rows.append_column(_SHARED_LEN, pa.array(self.shared_len[which]))


class PendingRows:
    """All pending rows for one worker, in plan order; suspects behind the others."""

    num_ahead = 512  # waiting in the engine, so that it can look past a row that does not fit

    def __init__(self, plan: Plan, store: Store) -> None:
        self._partial = store.load_partial()
        self._suspects = store.load_suspects()
        self._rows = self._in_order(plan, store)
        self.is_over = False

    def next(self) -> LeasedRow | None:
        """The next one; None when there is none any more."""
        following = next(self._rows, None)
        self.is_over = following is None
        return following

    def wait(self) -> None:
        raise AssertionError("all rows are there at once")

    def _in_order(self, plan: Plan, store: Store) -> Iterator[LeasedRow]:
        suspects = []
        for unit in pending_units(plan, store):
            rows = unit.rows(np.arange(len(unit.positions)))
            for leased in leased_rows(unit.index, rows, self._partial, self._suspects):
                if leased.num_given_up:
                    suspects.append(leased)
                else:
                    yield leased
        yield from suspects


def pending_units(plan: Plan, store: Store) -> Iterator[PendingUnit]:
    """Every unit of the plan, in its order; each may be committed to once it was handed out.

    Raises:
        StorageFailed: a unit or a part cannot be read.
    """
    first_shared_len = 0
    for unit in plan.units:
        table = read_unit(unit)
        keep_len = table.column("keep_len").to_numpy()
        is_done = np.isin(table.column("row_idx").to_numpy(), store.done(unit.index))
        positions = np.flatnonzero(~is_done)
        shared_len = np.concatenate([[first_shared_len], keep_len])[positions].astype(np.int32)
        # What lies between two rows shortens the prefix that they share.
        kept = np.minimum.reduceat(keep_len, positions) if len(positions) else keep_len[:0]
        yield PendingUnit(unit.index, table, positions, shared_len, kept)
        first_shared_len = int(keep_len[-1]) if len(keep_len) else first_shared_len


def leased_rows(
    unit: int, rows: pa.Table, output_ids: Mapping[int, tuple[int, ...]], num_given_up: Mapping[int, int]
) -> Iterator[LeasedRow]:
    """Rows of a unit (`PENDING_SCHEMA`), with what is known of some of them by their numbers."""
    for row in _planned_rows(rows):
        yield LeasedRow(unit, row, output_ids.get(row.row_idx, ()), num_given_up.get(row.row_idx, 0))


def _planned_rows(rows: pa.Table) -> Iterator[PlannedRow]:
    if not len(rows):
        return
    tokens = rows.column("token_ids").combine_chunks()
    offsets, values = tokens.offsets.to_numpy(), tokens.values.to_numpy()
    at = 0
    for batch in rows.drop_columns(["token_ids"]).to_batches(max_chunksize=_BATCH_ROWS):
        for row in batch.to_pylist():
            error = row["error"]
            yield PlannedRow(
                row_idx=row["row_idx"],
                token_ids=values[offsets[at] : offsets[at + 1]],
                shared_len=row["shared_len"],
                keep_len=row["keep_len"],
                params=row["params"],
                duplicates=tuple(row["duplicates"] or ()),
                error=None if error is None else RowError(**error),
            )
            at += 1
