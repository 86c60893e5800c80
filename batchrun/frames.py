"""Tables of other libraries in and out: pandas, datasets and Arrow, the same kind back.

Imports none of them before it is handed one.
"""

import sys
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from batchrun.errors import UsageError

T = TypeVar("T")


def write(dataset: Any, path: Path) -> None:
    """Writes `dataset` as one Parquet file. Raises UsageError for a kind that is not known."""
    pq.write_table(_to_arrow(dataset), path)


def read_like(dataset: T, folder: Path, prefix: str) -> T:
    """The result in `folder` as the kind of table that `dataset` is, row for row (a DataFrame's index too).

    With several samples a row, each row of `dataset` is there as often. `prefix` stands before the result's columns.
    """
    table = pa.concat_tables([pq.read_table(file) for file in sorted(folder.glob("*.parquet"))])
    result: Any = table
    if _is(dataset, "pandas", "DataFrame"):
        frame: Any = dataset
        result = table.to_pandas().set_axis(frame.index[table.column(f"{prefix}row_idx").to_numpy()])
    elif _is(dataset, "datasets", "Dataset"):
        result = sys.modules["datasets"].Dataset(table)
    return result  # type: ignore[no-any-return]


def first_error(folder: Path, prefix: str) -> str:
    """The message of the first failed row in the Parquet files of `folder`, which has one."""
    name = f"{prefix}error"
    columns = (pq.read_table(file, columns=[name]).column(name) for file in sorted(folder.glob("*.parquet")))
    return next(str(error["message"]) for column in columns for error in column.drop_null().to_pylist())


def _to_arrow(dataset: Any) -> pa.Table:
    if isinstance(dataset, pa.Table):
        return dataset
    if _is(dataset, "pandas", "DataFrame"):
        return pa.Table.from_pandas(dataset, preserve_index=False)
    if _is(dataset, "datasets", "Dataset"):
        return dataset.with_format("arrow")[:]
    raise UsageError(
        f"a table is a pandas DataFrame, a datasets.Dataset or a pyarrow.Table, not {type(dataset).__name__}; "
        "for files use submit()"
    )


def _is(value: object, module: str, name: str) -> bool:
    """Whether `value` is of a class of a module that has been imported, necessarily by whoever made the value."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)
