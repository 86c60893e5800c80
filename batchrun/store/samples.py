"""From the numbers of parts to the two columns of the result: which row of the input, and which sample of it.

With n samples a row, the parts' row n * i + s is sample s of row i. With one there is no column for it.
"""

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

_ROW, _SAMPLE = "row_idx", "sample_idx"


def sample_column(index_column: str) -> str:
    """The name of the sample's column beside the index, whatever its prefix."""
    return index_column.removesuffix(_ROW) + _SAMPLE


def published(results: pa.Schema, num_samples: int) -> pa.Schema:
    """The columns of the result, for those of the parts: the index first."""
    if num_samples == 1:
        return results
    return results.insert(1, pa.field(sample_column(results.names[0]), pa.int32(), nullable=False))


def split(rows: pa.Table, num_samples: int) -> pa.Table:
    """Rows of parts as the result has them (`published`)."""
    if num_samples == 1:
        return rows
    numbers = np.asarray(rows.column(0).to_numpy(), dtype=np.int64)
    schema = published(rows.schema, num_samples)
    row_idx, sample_idx = pa.array(numbers // num_samples), pa.array((numbers % num_samples).astype(np.int32))
    return pa.Table.from_arrays([row_idx, sample_idx, *rows.columns[1:]], schema=schema)


def numbers(batch: pa.RecordBatch | pa.Table, index_column: str, num_samples: int) -> NDArray[np.int64]:
    """The parts' numbers of rows of the result; int64 [num_rows]."""
    row_idx = np.asarray(batch.column(index_column).to_numpy(), dtype=np.int64)
    if num_samples == 1:
        return row_idx
    return row_idx * num_samples + np.asarray(batch.column(sample_column(index_column)).to_numpy(), dtype=np.int64)
