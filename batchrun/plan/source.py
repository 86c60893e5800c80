"""The input: which files, their common schema, and their rows as record batches, numbered from 0 over all files.

Knows nothing of prompts or models. The same inputs give the same rows under the same numbers, every time.
"""

import glob
import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePath
from typing import IO
from urllib.parse import unquote

import numpy as np
import pyarrow as pa

from batchrun.errors import DataError, InputMissing, UsageError
from batchrun.filesystem import explain, failures, is_url
from batchrun.nearest import nearest
from batchrun.plan.batch_requests import BatchRequestReader, is_batch_file
from batchrun.plan.readers import CsvReader, JsonReader, ParquetReader, Reader
from batchrun.plan.remote import RemoteFile, find, pure

ROW_IDX = pa.field("row_idx", pa.int64(), nullable=False)

_READERS: dict[str, Reader] = {
    "Parquet": ParquetReader(),
    "JSON Lines": JsonReader(),
    "CSV": CsvReader(),
    "batch requests": BatchRequestReader(),
}
_SUFFIXES = {
    ".parquet": "Parquet", ".pq": "Parquet", ".jsonl": "JSON Lines", ".ndjson": "JSON Lines", ".json": "JSON Lines",
    ".csv": "CSV", ".tsv": "CSV",
}  # fmt: skip
_COMPRESSIONS = (".gz", ".bz2", ".zst")
_HASHED_WHOLE_BYTES = 16 << 20
_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
_SMALLEST_PARQUET_BYTES = 12
_MAX_INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file; `name` tells it from the others wherever the input lies; `partition` are its folders' `key=value`."""

    path: Path | RemoteFile
    name: str
    partition: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class InputFiles:
    """The files in the order of their rows, all of one format."""

    files: tuple[InputFile, ...]
    format: str

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns of any file, and the partition columns last. Read once: of JSON Lines that is every line.

        Raises:
            DataError: a file that cannot be decoded, or columns that do not fit together.
        """
        return _common_schema(self.files, _READERS[self.format])


def expand(inputs: Iterable[str]) -> InputFiles:
    """The files that the inputs name, in the order given, those of a folder or glob sorted by path.

    A folder is searched in depth; names that start with `.` or `_` and other formats' files are passed over. Folders
    called `key=value` become columns.

    Raises:
        InputMissing: an input matches nothing or cannot be read.
        DataError: a file that is not Parquet though its name does not say otherwise, or mixed formats.
        UsageError: a file given twice.
    """
    files = [file for text in inputs for file in _expand_one(text)]
    paths = [os.path.realpath(file.path) if isinstance(file.path, Path) else str(file.path) for file in files]
    if twice := sorted({path for path in paths if paths.count(path) > 1}) if len(set(paths)) < len(paths) else []:
        raise UsageError(f"{twice[0]} is given twice; name each input once")
    formats = {_format(file.path): file for file in files}
    if len(formats) > 1:
        examples = " and ".join(f"{file.path} ({name})" for name, file in sorted(formats.items()))
        raise DataError(f"the input mixes formats: {examples}; give files of one format")
    if "Parquet" in formats:
        for file in files:
            _check_magic(file.path)
    return InputFiles(tuple(files), "batch requests" if _are_batch_requests(files) else next(iter(formats)))


def _are_batch_requests(files: list[InputFile]) -> bool:
    """Whether all of them hold requests of the OpenAI Batch API, which are JSON Lines too."""
    return all(_format(file.path) == "JSON Lines" and _holds_batch_requests(file.path) for file in files)


def _holds_batch_requests(path: Path | RemoteFile) -> bool:
    with _named(path):
        return is_batch_file(path)


def schema(files: InputFiles) -> pa.Schema:
    """`files.schema`."""
    return files.schema


def require_column(schema: pa.Schema, name: str, option: str) -> pa.Field:
    """The column called `name`.

    Raises:
        DataError: there is none; the message says which `option` asked for it, the nearest name and all the others.
    """
    if name in schema.names:
        return schema.field(name)
    close = nearest(name, schema.names)
    hint = f"did you mean {close!r}? " if close else ""
    shown = ", ".join(schema.names[:20]) + (", …" if len(schema.names) > 20 else "")
    # A preset names one, and whoever gave --prompt-col alone may have meant it.
    what = "; --target-col names the text that is scored, --prompt-col what stands before it"
    raise DataError(
        f"{option}: the input has no column {name!r}; {hint}it has: {shown}{what if option == '--target-col' else ''}"
    )


def scan(
    files: InputFiles, columns: Iterable[str] | None = None, limit: int | None = None, batch_rows: int = 8192
) -> Iterator[pa.RecordBatch]:
    """The rows in input order, at most `batch_rows` and about 8 MiB (of text formats 16) at a time.

    Each batch has `row_idx` (int64) first and then `columns` (None: all) in the order asked for, with the types of
    `files.schema`. Text is not validated.

    Raises:
        DataError: a file that cannot be decoded, named.
        InputMissing: a file that is gone.
    """
    names = list(dict.fromkeys(files.schema.names if columns is None else columns))
    wanted = pa.schema([files.schema.field(name) for name in names])
    start = 0
    for file in files.files:
        for batch in _read(file, files, wanted, batch_rows):
            rows = batch if limit is None else batch.slice(0, limit - start)
            row_idx = pa.array(np.arange(start, start + len(rows), dtype=np.int64))
            yield pa.RecordBatch.from_arrays([row_idx, *rows.columns], schema=pa.schema([ROW_IDX, *wanted]))
            start += len(rows)
            if limit is not None and start >= limit:
                return


def fingerprint(files: InputFiles) -> dict[str, str]:
    """What identifies the files' contents and order: number and name → size and digest.

    Files up to 16 MiB are hashed whole; of a longer one the Parquet footer, or the time of its last change. Of a
    remote one, the store's ETag.
    """
    return {f"{number} {file.name}": _digest(file.path, files.format) for number, file in enumerate(files.files)}


def _expand_one(text: str) -> list[InputFile]:
    if is_url(text):
        return _expand_url(text)
    path = Path(text)
    if path.is_dir():
        found = _in_folder(path)
    elif path.exists():
        return [InputFile(path, path.name)]
    else:
        matches = sorted(Path(match) for match in glob.glob(text, recursive=True))  # noqa: PTH207 - absolute patterns
        found = [file for match in matches for file in (_in_folder(match) if match.is_dir() else [_plain(match)])]
        found = list({file.path: file for file in found}.values())
        if not matches:
            raise InputMissing(f"no input matches {text}; check the path")
    return _some(found, text)


def _expand_url(url: str) -> list[InputFile]:
    found = find(url)
    if not found.files:
        raise InputMissing(f"no input matches {url}; check the URL")
    if found.folder is None:
        return [InputFile(file, pure(file).name, _partition(pure(file).parts[:-1])) for file in found.files]
    return _some([file for each in found.files if (file := _inside(each, found.folder))], url)


def _inside(file: RemoteFile, folder: str) -> InputFile | None:
    """The file under its name in the folder; None where it is to be passed over."""
    inside = pure(file).relative_to(folder)
    if _is_passed_over(inside):
        return None
    return InputFile(file, inside.as_posix(), _partition(pure(file).parts[:-1]))


def _some(found: list[InputFile], text: str) -> list[InputFile]:
    if not found:
        raise InputMissing(f"{text} holds no Parquet, JSON Lines or CSV file; name the files themselves")
    return found


def _plain(path: Path) -> InputFile:
    return InputFile(path, path.name, _partition(path.parts[:-1]))


def _is_passed_over(inside: PurePath) -> bool:
    return any(part.startswith((".", "_")) for part in inside.parts) or not _suffix(inside)


def _in_folder(folder: Path) -> list[InputFile]:
    files = []
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if not _is_passed_over(inside) and path.is_file():
            files.append(InputFile(path, inside.as_posix(), _partition(path.parts[:-1])))
    return files


def _partition(folders: Iterable[str]) -> tuple[tuple[str, str], ...]:
    pairs = [folder.partition("=") for folder in folders]
    return tuple((unquote(key), unquote(value)) for key, equals, value in pairs if equals and key)


def _suffix(path: PurePath) -> str | None:
    name = path.with_suffix("") if path.suffix.lower() in _COMPRESSIONS else path
    return _SUFFIXES.get(name.suffix.lower())


def _format(path: Path | RemoteFile) -> str:
    """By the name, or Parquet for a name that says nothing."""
    return _suffix(pure(path)) or "Parquet"


def _check_magic(path: Path | RemoteFile) -> None:
    with _named(path), _open(path) as stream:
        head = stream.read(4)
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(size - 4, 0))
        tail = stream.read(4)
    if not head == tail == b"PAR1" or size < _SMALLEST_PARQUET_BYTES:
        known = ", ".join(_SUFFIXES)
        raise DataError(f"{path} is not a Parquet file ({size:,} bytes); it may be cut off, or misnamed: {known}")


def _open(path: Path | RemoteFile) -> IO[bytes]:
    return path.open("rb") if isinstance(path, Path) else path.open()


def _common_schema(files: tuple[InputFile, ...], reader: Reader) -> pa.Schema:
    fields: list[pa.Schema] = []
    for file in files:
        found = _schema(file, reader)
        if twice := [name for name in found.names if found.names.count(name) > 1]:
            raise DataError(f"{file.path} has two columns called {twice[0]!r}; rename one of them")
        fields.append(pa.schema([pa.field(field.name, field.type) for field in found]))
        try:
            fields = [pa.unify_schemas(fields, promote_options="permissive")]
        except (pa.ArrowTypeError, pa.ArrowInvalid) as error:
            reason = str(error).partition("\n")[0]
            raise DataError(f"the columns of {file.path} do not fit the other files': {reason}") from error
    partition = pa.schema([(key, _partition_type(files, key)) for key in _partition_keys(files)])
    return pa.schema([*(field for field in fields[0] if field.name not in partition.names), *partition])


def _schema(file: InputFile, reader: Reader) -> pa.Schema:
    with _named(file.path):
        return reader.schema(file.path)


def _partition_keys(files: tuple[InputFile, ...]) -> list[str]:
    return list(dict.fromkeys(key for file in files for key, _ in file.partition))


def _partition_type(files: tuple[InputFile, ...], key: str) -> pa.DataType:
    values = [value for file in files for name, value in file.partition if name == key and value != _HIVE_NULL]
    whole = all(value.removeprefix("-").isascii() and value.removeprefix("-").isdigit() for value in values)
    return pa.int32() if whole and all(abs(int(value)) <= _MAX_INT32 for value in values) else pa.string()


def _read(file: InputFile, files: InputFiles, wanted: pa.Schema, batch_rows: int) -> Iterator[pa.RecordBatch]:
    """The file's rows with exactly the wanted columns; one that it lacks is null."""
    reader = _READERS[files.format]
    partition = dict(file.partition)
    with _named(file.path):
        own = files.schema if files.format == "JSON Lines" else reader.schema(file.path)
        columns = [name for name in wanted.names if name in own.names and name not in partition]
        for batch in reader.batches(file.path, columns, files.schema, batch_rows):
            if not len(batch):
                continue
            arrays = [_column(batch, field, partition.get(field.name)) for field in wanted]
            # The row count comes from the batch: a batch without columns has rows too.
            filler = pa.array(np.zeros(len(batch), dtype=np.bool_))
            whole = pa.RecordBatch.from_arrays([filler, *arrays], ["", *wanted.names])
            yield whole.select(range(1, len(arrays) + 1))


def _column(batch: pa.RecordBatch, field: pa.Field, partition: str | None) -> pa.Array:
    if partition is not None:
        value = None if partition == _HIVE_NULL else partition
        return pa.array([value], pa.string()).cast(field.type).take(pa.array(np.zeros(len(batch), dtype=np.int8)))
    if field.name not in batch.schema.names:
        return pa.nulls(len(batch), field.type)
    column = batch.column(field.name)
    return column if column.type == field.type else column.cast(field.type)


def _digest(path: Path | RemoteFile, format: str) -> str:
    if isinstance(path, RemoteFile):
        return f"{path.size} {path.version}"
    with _named(path):
        status = path.stat()
        if status.st_size <= _HASHED_WHOLE_BYTES:
            identity = hashlib.sha256(path.read_bytes()).hexdigest()
        elif format == "Parquet":
            identity = _footer_digest(path)
        else:
            identity = f"mtime {status.st_mtime_ns}"
    return f"{status.st_size} {identity[:32]}"


def _footer_digest(path: Path) -> str:
    size = path.stat().st_size
    with path.open("rb") as stream:
        stream.seek(size - 8)
        footer = int.from_bytes(stream.read(4), "little")
        stream.seek(max(size - 8 - footer, 0))
        return hashlib.sha256(stream.read(footer)).hexdigest()


@contextmanager
def _named(path: Path | RemoteFile) -> Iterator[None]:
    """Turns what reading a file raises into an error that names the file."""
    try:
        yield
    except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise InputMissing(f"cannot read {path}: {reason}") from error
    except (pa.ArrowException, *failures()) as error:
        if isinstance(path, RemoteFile) and not isinstance(error, pa.ArrowException):
            raise InputMissing(f"cannot read {path}: {explain(error)}") from error
        reason = str(error).strip().partition("\n")[0]
        raise DataError(f"{path} is not a valid {_format(path)} file: {reason}") from error
