"""The Parquet files of OUT: where they are cut, and the folders that they lie in.

Both are the same for the same rows in the same batches. Knows nothing of parts or inputs.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchrun.errors import DataError
from batchrun.store.durable import storage_errors, sync_file

_GROUP_ROWS = 65_536
_GROUP_BYTES = 64 << 20
_FILE_ROWS = 16 * _GROUP_ROWS
# Rows that wait for their row group, over all folders; beyond it the largest group is written as it is.
_WAITING_BYTES = 512 << 20
# Each has a file open while the result is written.
MAX_PARTITIONS = 500
# The longest name that a folder can have on Linux, macOS and Windows; `partition_folder` gives ASCII.
_NAME_BYTES = 255
HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
# In a file's footer: the name and the type of the column that names its folder.
_COLUMN_KEY, _TYPE_KEY = b"batchrun.partition_by", b"batchrun.partition_type"


@dataclass(frozen=True, slots=True)
class Shape:
    """How the rows lie in files: of about `file_bytes`, in a folder for each value of the column `partition_by`.

    In the `order` of the input, or as they were answered.
    """

    partition_by: str | None = None
    file_bytes: int = 256 << 20
    order: Literal["input", "run"] = "input"


class ResultFiles:
    """All files of one result; rows in the order given, with `partition_by` within each folder."""

    def __init__(self, folder: Path, schema: pa.Schema, shape: Shape) -> None:
        """`folder` exists. The column that names the folders is in no file, as Hive has it."""
        self._folder = folder
        self._whole = schema
        self._shape = shape
        by = shape.partition_by
        self.schema = schema if by is None else _without(schema, by)
        self._files: dict[Any, _Files] = {} if by else {None: _Files(folder, self.schema, shape.file_bytes)}

    def append(self, columns: list[pa.Array | pa.ChunkedArray]) -> None:
        """The next rows. Raises StorageFailed."""
        table = pa.Table.from_arrays(columns, schema=self._whole)
        by = self._shape.partition_by
        if by is None:
            self._files[None].append(table)
            return
        values = table.column(by)
        rest = table.drop_columns(by)
        for value in values.unique():
            mask = pc.equal(values, value) if value.is_valid else pc.is_null(values)
            self._of(value).append(rest.filter(mask))
        while sum(files.num_waiting_bytes for files in self._files.values()) > _WAITING_BYTES:
            max(self._files.values(), key=lambda files: files.num_waiting_bytes).flush()

    def close(self) -> list[dict[str, str | int]]:
        """Writes what is left, at least one file; returns the name, rows and digest of each, by name."""
        if not self._files:
            # No row, so no folder: one file without rows says what the columns are.
            self.schema = self._whole
            self._files[None] = _Files(self._folder, self._whole, self._shape.file_bytes)
        written = [entry for files in self._files.values() for entry in files.close()]
        return sorted(written, key=lambda entry: str(entry["name"]))

    def _of(self, value: pa.Scalar) -> "_Files":
        key = value.as_py()
        if key not in self._files:
            folder = self._folder / partition_folder(str(self._shape.partition_by), value)
            with storage_errors(folder):
                folder.mkdir()
            self._files[key] = _Files(folder, self.schema, self._shape.file_bytes, f"{folder.name}/")
        return self._files[key]


def partition_folder(column: str, value: pa.Scalar) -> str:
    """COLUMN=value as Hive, DuckDB and pyarrow write it."""
    text = quote(str(value.cast(pa.string())), safe="") if value.is_valid else HIVE_NULL
    return folder_prefix(column) + text


def folder_prefix(column: str) -> str:
    """What stands before the value in the name of a folder."""
    return f"{quote(column, safe='')}="


def as_read(schema: pa.Schema) -> pa.Schema:
    """The schema as a reader of a file sees it: Parquet has a name of its own for what is in a list."""
    file = pa.BufferOutputStream()
    pq.write_table(schema.empty_table(), file)
    return pq.read_schema(pa.BufferReader(file.getvalue()))


def partition_field(schema: pa.Schema) -> pa.Field | None:
    """The column that names the folder of a file with this schema and footer; None where it lies in none."""
    footer = schema.metadata or {}
    if _COLUMN_KEY not in footer:
        return None
    return pa.field(footer[_COLUMN_KEY].decode(), pa.type_for_alias(footer[_TYPE_KEY].decode()))


def _without(schema: pa.Schema, column: str) -> pa.Schema:
    """The schema of files in folders that are named by `column`."""
    noted = {_COLUMN_KEY: column, _TYPE_KEY: str(schema.field(column).type)}
    return schema.remove(schema.get_field_index(column)).with_metadata({**(schema.metadata or {}), **noted})


def check_partitions(values: pa.Array, column: str) -> None:
    """Raises DataError when these distinct values of a column cannot be folders."""
    kind = values.type
    if not any(check(kind) for check in (pa.types.is_string, pa.types.is_large_string, pa.types.is_integer,
                                         pa.types.is_boolean, pa.types.is_date)):  # fmt: skip
        raise DataError(f"--partition-by: column {column!r} is {kind}; folders need text, whole numbers or dates")
    if len(values) > MAX_PARTITIONS:
        raise DataError(
            f"--partition-by: column {column!r} has more than {MAX_PARTITIONS} values; choose one with fewer"
        )
    if any(value.is_valid and not str(value) for value in values):
        raise DataError(f"--partition-by: column {column!r} has empty values, which are no folder's name; fill them")
    for value in values:
        _check_folder(value, column)


def _check_folder(value: pa.Scalar, column: str) -> None:
    """Raises DataError when the folder of this value cannot be made, or would be read as another value's."""
    if str(value) == HIVE_NULL:
        raise DataError(
            f"--partition-by: column {column!r} has the value {HIVE_NULL!r}, which stands for null in folders' names; "
            "change it"
        )
    name = partition_folder(column, value)
    if len(name) > _NAME_BYTES:
        raise DataError(
            f"--partition-by: column {column!r} has the value {str(value)!r}, whose folder's name is {len(name)} bytes "
            f"long; {_NAME_BYTES} are the most: choose a column with shorter values"
        )


class _Files:
    """Parquet files of a bounded size in one folder."""

    def __init__(self, folder: Path, schema: pa.Schema, file_bytes: int, prefix: str = "") -> None:
        """`prefix` stands before the names of the files where they are listed."""
        self._folder = folder
        self._schema = schema
        self._file_bytes = file_bytes
        self._prefix = prefix
        self._pending = schema.empty_table()
        self._writer: pq.ParquetWriter | None = None
        self._file_rows = 0
        self._written: list[dict[str, str | int]] = []

    @property
    def num_waiting_bytes(self) -> int:
        return int(self._pending.nbytes)

    def append(self, table: pa.Table) -> None:
        self._pending = pa.concat_tables([self._pending, table.cast(self._schema)])
        group_bytes = min(_GROUP_BYTES, self._file_bytes)
        while self._pending.num_rows >= _GROUP_ROWS or self._pending.nbytes >= group_bytes:
            fitting = self._pending.num_rows * group_bytes // max(self._pending.nbytes, 1)
            num_rows = min(max(fitting, 1), _GROUP_ROWS)
            self._write(self._pending.slice(0, num_rows))
            self._pending = self._pending.slice(num_rows)

    def flush(self) -> None:
        """Writes what waits for more rows."""
        self._write(self._pending)
        self._pending = self._schema.empty_table()

    def close(self) -> list[dict[str, str | int]]:
        """Writes what is left, at least one file; returns the name, rows and digest of each."""
        if self._pending.num_rows or not self._written:
            self._write(self._pending)
        self._finish_file()
        return self._written

    @property
    def _path(self) -> Path:
        return self._folder / f"part-{len(self._written):05d}.parquet"

    def _write(self, group: pa.Table) -> None:
        with storage_errors(self._path):
            if self._writer is None:
                self._writer = pq.ParquetWriter(self._path, self._schema, compression="zstd", write_page_checksum=True)
            if group.num_rows:
                # A row group without rows is one that datasets cannot read; without any group it can.
                self._writer.write_table(group, row_group_size=_GROUP_ROWS)
            self._file_rows += group.num_rows
            is_full = self._file_rows >= _FILE_ROWS or self._path.stat().st_size >= self._file_bytes
        if is_full:
            self._finish_file()

    def _finish_file(self) -> None:
        if self._writer is None:
            return
        path = self._path
        with storage_errors(path):
            self._writer.close()
            sync_file(path)
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        self._written.append({"name": self._prefix + path.name, "num_rows": self._file_rows, "sha256": digest})
        self._writer, self._file_rows = None, 0
