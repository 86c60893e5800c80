"""Rows of OUT by a condition in SQL over its columns, as DuckDB understands it."""

from collections.abc import Sequence
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchrun.errors import StorageFailed, UsageError
from batchrun.store.result_rows import connect, read_result


def select_rows(files: Sequence[Path], where: str, index_column: str, scratch: Path) -> NDArray[np.int64]:
    """The rows, by index and ascending, for which `where` is true; `scratch` is a folder for what exceeds the memory.

    Raises:
        UsageError: DuckDB does not accept the condition; the message is its own.
        StorageFailed: a file cannot be read.
    """
    with connect(scratch) as connection:
        try:
            rows = read_result(connection, files)
        except (duckdb.Error, pa.ArrowException, OSError) as error:
            raise StorageFailed(f"cannot read the result: {error}") from error
        column = duckdb.ColumnExpression(index_column)
        try:
            # The line break ends a comment.
            found = rows.filter(f"{where}\n").select(column).order(f'"{index_column}"').fetchnumpy()
        except duckdb.IOException as error:
            raise StorageFailed(f"cannot read the result: {error}") from error
        except duckdb.Error as error:
            raise UsageError(f"--where {where}: {error}") from error
    return np.asarray(found[index_column], dtype=np.int64)
