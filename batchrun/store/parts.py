"""The part files: written once, read back whole and checked.

The first column of a part is the row's index, whatever its name; the other columns are the task's.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from batchrun.errors import StorageFailed
from batchrun.store.counts import COUNTS_KEY, Counts, PartDamaged
from batchrun.store.durable import sync_file, sync_folder
from batchrun.store.layout import Part

JOB_ID_KEY = "batchrun.job_id"


def write_part(table: pa.Table, path: Path, job_id: str) -> None:
    """Writes `table` with its counts and the job's id in the footer; raises OSError."""
    counts = Counts(table.num_rows, _count_errors(table))
    stamped = table.replace_schema_metadata({COUNTS_KEY: counts.to_json(), JOB_ID_KEY: job_id})
    pq.write_table(stamped, path, compression="zstd", write_statistics=False, write_page_checksum=True)


def read_row_idx(part: Part, job_id: str) -> NDArray[np.int64]:
    """The rows of one part, in its order; int64 [num_rows]. Raises PartDamaged, or StorageFailed for a stranger."""
    with _damage(part), _open(part) as file:
        written_by = (file.metadata.metadata or {}).get(JOB_ID_KEY.encode(), b"").decode()
        first = file.schema_arrow.names[:1]
        # Of one column of one file: handing it to threads takes longer than reading it.
        column = file.read(columns=first, use_threads=False).column(0)
    if written_by != job_id:
        raise StorageFailed(f"{part.path} belongs to job {written_by or '?'}, not to {job_id}; move it away")
    return np.asarray(column.to_numpy(), dtype=np.int64)


def read_part(part: Part, schema: pa.Schema) -> pa.Table:
    """All of one part with the columns of `schema`. Raises PartDamaged, also for other columns."""
    with _damage(part), _open(part) as file:
        table = file.read()
    if table.schema.names != schema.names:
        raise PartDamaged(part.path, f"columns {table.schema.names} instead of {schema.names}")
    with _damage(part):
        return table.cast(schema)


def write_without(parts: Iterable[Part], rows: NDArray[np.int64], folder: Path, job_id: str) -> None:
    """The same parts in `folder`, which exists, without `rows`: those that lose none are the same file, durable all.

    Raises PartDamaged, or OSError for what cannot be written.
    """
    for part in parts:
        is_left = ~np.isin(read_row_idx(part, job_id), rows)
        path = folder / part.path.name
        if is_left.all():
            path.hardlink_to(part.path)
        elif is_left.any():
            with _damage(part), _open(part) as file:
                table = file.read()
            write_part(table.filter(pa.array(is_left)), path, job_id)
            sync_file(path)
    sync_folder(folder)


def read_answered(part: Part, schema: pa.Schema) -> NDArray[np.int64]:
    """The rows of one part that did not fail; int64 [num_rows]. `schema` is the parts'. Raises PartDamaged."""
    index, error = schema.names[0], next(name for name in schema.names if name.endswith("error"))
    with _damage(part), _open(part) as file:
        table = file.read(columns=[index, error])
    answered = table.filter(table.column(error).is_null())
    return np.asarray(answered.column(index).to_numpy(), dtype=np.int64)


def _count_errors(table: pa.Table) -> dict[str, int]:
    columns = [column.name for column in table.schema if column.name.endswith("error") and _is_row_error(column.type)]
    if not columns:
        return {}
    types = table.column(columns[-1]).flatten()[0].drop_null()
    return {str(item["values"]): int(item["counts"]) for item in types.value_counts().to_pylist()}


def _is_row_error(column_type: pa.DataType) -> bool:
    return bool(pa.types.is_struct(column_type)) and [field.name for field in column_type] == ["type", "message"]


def _open(part: Part) -> pq.ParquetFile:
    return pq.ParquetFile(part.path, page_checksum_verification=True)


@contextmanager
def _damage(part: Part) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise StorageFailed(f"{part.path} has disappeared; run the same command again") from error
    except (pa.ArrowException, OSError) as error:
        raise PartDamaged(part.path, str(error).splitlines()[0]) from error
