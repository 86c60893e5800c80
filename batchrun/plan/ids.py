"""The id column's promise: every row has an id and no two have the same."""

from pathlib import Path

import pyarrow as pa

from batchrun.errors import DataError, RowError
from batchrun.plan.cells import column_values, row_numbers
from batchrun.plan.runs import ExternalSort

_ROW_BYTES = 8


class UniqueIds:
    """Collects the ids of all rows, beyond memory, and checks them."""

    def __init__(self, column: str, folder: Path, memory_bytes: int = 64 << 20) -> None:
        """Works in `folder`, which exists."""
        self._column = column
        self._sort = ExternalSort(folder, memory_bytes)

    def add(self, batch: pa.RecordBatch) -> None:
        """Raises DataError: a row has no id, or one that cannot be read."""
        rows = row_numbers(batch).tolist()
        ids = column_values(batch, self._column)
        for row, value in zip(rows, ids, strict=True):
            if value is None or isinstance(value, RowError):
                what = "has no id" if value is None else "has an id that cannot be read"
                raise DataError(f"--id-col: row {row} {what} in column {self._column!r}; give every row one")
        self._sort.add(
            str(value).encode() + row.to_bytes(_ROW_BYTES, "big") for row, value in zip(rows, ids, strict=True)
        )

    def check(self) -> None:
        """Raises DataError: two rows have the same id."""
        last = b""
        for records in self._sort.drain():
            for record in records:
                if last and record[:-_ROW_BYTES] == last[:-_ROW_BYTES]:
                    first, second = (int.from_bytes(each[-_ROW_BYTES:], "big") for each in (last, record))
                    name = record[:-_ROW_BYTES].decode()
                    raise DataError(
                        f"--id-col: rows {first} and {second} have the same id {name!r} in column {self._column!r}; "
                        "make ids unique, or leave --id-col out (row_idx identifies rows)"
                    )
                last = record
