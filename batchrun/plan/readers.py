"""One input file of each format: its schema, and its rows in record batches of bounded size.

Knows nothing of globs, folders, row numbers or prompts. A text column may hold invalid UTF-8: nothing here validates
it, so that one bad row does not cost the file. Raises what pyarrow raises; `source` gives it the file's name.
"""

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.json as pj
import pyarrow.parquet as pq

from batchrun.plan.remote import RemoteFile, pure, readable, stream

_BATCH_BYTES = 8 << 20
_BLOCK_BYTES = 16 << 20
_STREAM_BYTES = 1 << 20
_SAMPLED_GROUPS = 64


class Reader(Protocol):
    """A file format."""

    def schema(self, path: Path | RemoteFile) -> pa.Schema:
        """The file's columns and types."""
        ...

    def batches(
        self, path: Path | RemoteFile, columns: list[str], schema: pa.Schema, batch_rows: int
    ) -> Iterator[pa.RecordBatch]:
        """The rows of `columns` (each in the file) in order; types may still differ from those of `schema`."""
        ...


class ParquetReader:
    """Pages as they come: a row group of any size costs one batch of memory (a dataset scan would hold it whole)."""

    def schema(self, path: Path | RemoteFile) -> pa.Schema:
        with pq.ParquetFile(readable(path)) as file:
            return file.schema_arrow.remove_metadata()

    def batches(
        self, path: Path | RemoteFile, columns: list[str], schema: pa.Schema, batch_rows: int
    ) -> Iterator[pa.RecordBatch]:
        with pq.ParquetFile(readable(path), pre_buffer=False, buffer_size=_STREAM_BYTES) as file:
            rows = min(batch_rows, _rows_within(file.metadata, set(columns), _BATCH_BYTES))
            yield from file.iter_batches(batch_size=rows, columns=columns, use_threads=False)


class JsonReader:
    """JSON Lines, read in pieces cut at line ends.

    Every line of the file takes part in the schema, however far down a column first appears. Text that looks like a
    date stays text.
    """

    def schema(self, path: Path | RemoteFile) -> pa.Schema:
        known = [pa.schema([])]
        for piece, line in pieces(path):
            found = _read_json(piece, line, None).schema
            known = [pa.unify_schemas([*known, _plain(found)], promote_options="permissive")]
        return known[0]

    def batches(
        self, path: Path | RemoteFile, columns: list[str], schema: pa.Schema, batch_rows: int
    ) -> Iterator[pa.RecordBatch]:
        for piece, line in pieces(path):
            table = _read_json(piece, line, schema)
            missing = [name for name in columns if name not in table.column_names]
            for name in missing:
                table = table.append_column(name, pa.nulls(len(table), schema.field(name).type))
            yield from table.select(columns).to_batches(max_chunksize=batch_rows)


class CsvReader:
    """CSV with a header (tab-separated when the name says .tsv); a type is that of the file's first 16 MiB."""

    def schema(self, path: Path | RemoteFile) -> pa.Schema:
        with self._open(path) as stream:
            return stream.schema

    def batches(
        self, path: Path | RemoteFile, columns: list[str], schema: pa.Schema, batch_rows: int
    ) -> Iterator[pa.RecordBatch]:
        with self._open(path) as stream:
            for batch in stream:
                selected = batch.select(columns)
                for start in range(0, len(selected), batch_rows):
                    yield selected.slice(start, batch_rows)

    def _open(self, path: Path | RemoteFile) -> pc.CSVStreamingReader:
        delimiter = "\t" if ".tsv" in pure(path).suffixes else ","
        return pc.open_csv(
            stream(path),
            read_options=pc.ReadOptions(block_size=_BLOCK_BYTES),
            parse_options=pc.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            convert_options=pc.ConvertOptions(check_utf8=False),
        )


def _rows_within(metadata: pq.FileMetaData, columns: set[str], num_bytes: int) -> int:
    """Rows of the given columns that take about `num_bytes` in memory, by the file's own account; at least 16."""
    densest = 0.0
    for index in range(min(metadata.num_row_groups, _SAMPLED_GROUPS)):
        group = metadata.row_group(index)
        chunks = [group.column(column) for column in range(metadata.num_columns)]
        size = sum(chunk.total_uncompressed_size for chunk in chunks if _column_name(chunk, columns) in columns)
        densest = max(densest, size / max(group.num_rows, 1))
    return max(16, int(num_bytes / densest)) if densest else metadata.num_rows or 1


def _column_name(chunk: pq.ColumnChunkMetaData, columns: set[str]) -> str:
    """The top-level column of a leaf; a name may have dots itself."""
    path: str = chunk.path_in_schema
    return path if path in columns else path.partition(".")[0]


def pieces(path: Path | RemoteFile) -> Iterator[tuple[bytes, int]]:
    """Whole lines, about 16 MiB at a time, with the number of lines before them; blank pieces are left out."""
    line = 0
    rest: list[bytes] = []
    with stream(path) as opened:
        while block := opened.read(_BLOCK_BYTES):
            cut = block.rfind(b"\n") + 1
            rest.append(block[:cut] if cut else block)
            if cut:
                piece = b"".join(rest)
                rest = [block[cut:]]
                if piece.strip():
                    yield piece, line
                line += piece.count(b"\n")
    if (piece := b"".join(rest)).strip():
        yield piece, line


def _read_json(piece: bytes, line: int, schema: pa.Schema | None) -> pa.Table:
    read = pj.ReadOptions(block_size=len(piece) + 1)
    try:
        return pj.read_json(io.BytesIO(piece), read, pj.ParseOptions(explicit_schema=schema))
    except pa.ArrowInvalid as error:
        raise pa.ArrowInvalid(_with_line(str(error), piece, line)) from error


def _with_line(said: str, piece: bytes, line: int) -> str:
    """pyarrow's message with the line of the file, from 1, in place of the row of the piece, from 0."""
    found = re.fullmatch(r"(.*?)\.? in row (\d+)", said, flags=re.DOTALL)
    if found is None:
        return f"after line {line}: {said}"
    filled = [number for number, text in enumerate(piece.split(b"\n"), line + 1) if text.strip()]
    return f"line {filled[int(found[2])]}: {found[1]}"


def _plain(schema: pa.Schema) -> pa.Schema:
    return pa.schema([field.with_type(_plain_type(field.type)) for field in schema])


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """The type with guessed timestamps as the text that they were."""
    if pa.types.is_timestamp(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_plain_type(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_plain_type(field.type)) for field in kind])
    return kind
