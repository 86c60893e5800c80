"""Values out of a record batch, row by row, where a cell that cannot be read is that row's error and nobody else's."""

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchrun.errors import RowError


def row_numbers(batch: pa.RecordBatch) -> NDArray[np.int64]:
    """The rows' numbers in the whole input; int64 [num_rows]."""
    numbers: NDArray[np.int64] = batch.column(0).to_numpy()
    return numbers


def column_values(batch: pa.RecordBatch, name: str) -> list[Any | RowError]:
    """The column's values as Python's own, bytes as text. The input's column, also when it is called `row_idx`."""
    column = batch.column(batch.schema.get_all_field_indices(name)[-1])
    rows = row_numbers(batch)
    try:
        values: list[Any | RowError] = column.to_pylist()
    except (ValueError, OverflowError, pa.ArrowException):
        values = [_one(column[index], int(rows[index]), name) for index in range(len(column))]
    if is_bytes(column.type):
        values = [_decoded(value, int(row), name) for value, row in zip(values, rows, strict=True)]
    return values


def is_text(kind: pa.DataType) -> bool:
    """Whether a column of this type can hold a prompt: text, bytes taken for UTF-8, or nothing but nulls."""
    if pa.types.is_dictionary(kind):
        return is_text(kind.value_type)
    text = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return pa.types.is_null(kind) or is_bytes(kind) or any(check(kind) for check in text)


def is_bytes(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return is_bytes(kind.value_type)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind))


def _one(cell: pa.Scalar, row: int, name: str) -> Any | RowError:
    try:
        return cell.as_py()
    except UnicodeDecodeError as error:
        return _invalid_utf8(error, row, name)
    except (ValueError, OverflowError, pa.ArrowException) as error:
        message = f"row {row}: column {name!r} holds a value that cannot be read ({error}); correct it"
        return RowError("template_error", message)


def _decoded(value: bytes | RowError | None, row: int, name: str) -> str | RowError | None:
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        return _invalid_utf8(error, row, name)


def _invalid_utf8(error: UnicodeDecodeError, row: int, name: str) -> RowError:
    where = f"byte {error.object[error.start]:#04x} at offset {error.start}"
    return RowError("invalid_utf8", f"row {row}: column {name!r} is not UTF-8 ({where}); re-encode it")
