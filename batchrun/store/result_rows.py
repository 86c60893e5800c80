"""The files of OUT as one DuckDB relation with every column, those in the folders' names too, each of its own type."""

from collections.abc import Sequence
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from batchrun.store.result_files import HIVE_NULL, folder_prefix, partition_field

_PATH = "batchrun.path"


def connect(scratch: Path) -> duckdb.DuckDBPyConnection:
    """To nothing but the memory; what exceeds it goes to the folder `scratch`, which exists."""
    return duckdb.connect(config={"temp_directory": str(scratch)})


def read_result(connection: duckdb.DuckDBPyConnection, files: Sequence[Path]) -> duckdb.DuckDBPyRelation:
    """The rows of `files`, of which there is one at least; only the folder that a file lies in is read as a value.

    DuckDB's own reading of such folders would guess types, and take every COLUMN=value above OUT for a column too.
    Raises duckdb.Error, and what pyarrow raises about a footer that it cannot read.
    """
    field = partition_field(pq.read_schema(files[0]))
    paths = ", ".join(_text(str(path)) for path in files)
    if field is None:
        return connection.sql(f"FROM read_parquet([{paths}], hive_partitioning = false)")
    (kind,) = connection.from_arrow(pa.schema([field]).empty_table()).types
    start = len(folder_prefix(field.name)) + 1
    text = f"substr(split_part({_name(_PATH)}, '/', -2), {start})"
    value = f"CAST(url_decode(nullif({text}, {_text(HIVE_NULL)})) AS {kind}) AS {_name(field.name)}"
    return connection.sql(
        f"SELECT * EXCLUDE ({_name(_PATH)}), {value} "
        f"FROM read_parquet([{paths}], hive_partitioning = false, filename = {_text(_PATH)})"
    )


def _text(value: str) -> str:
    """As a constant in SQL."""
    return "'" + value.replace("'", "''") + "'"


def _name(value: str) -> str:
    """As a name in SQL."""
    return '"' + value.replace('"', '""') + '"'
