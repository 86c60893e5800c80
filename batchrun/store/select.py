"""Rows of OUT by a condition in SQL over its columns, as DuckDB understands it."""

from collections.abc import Sequence
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchrun.errors import StorageFailed, UsageError
from batchrun.store.result_rows import connect, read_result
from batchrun.store.samples import numbers, sample_column


def select_rows(
    files: Sequence[Path], where: str, index_column: str, num_samples: int, scratch: Path
) -> NDArray[np.int64]:
    """The rows, by the parts' numbers and ascending, for which `where` is true.

    `scratch` is a folder for what exceeds the memory.

    Raises:
        UsageError: DuckDB does not accept the condition; the message is its own.
        StorageFailed: a file cannot be read.
    """
    with connect(scratch) as connection:
        try:
            rows = read_result(connection, files)
        except (duckdb.Error, pa.ArrowException, OSError) as error:
            raise StorageFailed(f"cannot read the result: {error}") from error
        index = [index_column, *([sample_column(index_column)] if num_samples > 1 else [])]
        columns = [duckdb.ColumnExpression(name) for name in index]
        try:
            # The line break ends a comment.
            found = rows.filter(f"{where}\n").select(*columns).to_arrow_table()
        except duckdb.IOException as error:
            raise StorageFailed(f"cannot read the result: {error}") from error
        except duckdb.Error as error:
            raise UsageError(f"--where {where}: {error}") from error
    return np.sort(numbers(found, index_column, num_samples))
