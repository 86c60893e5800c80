"""OUT in the forms that other tools take: JSON Lines, the output of the OpenAI Batch API, a folder of `datasets`.

Rows are in the input's order, and the target appears whole or not at all. Knows nothing of jobs that are not complete.
"""

import base64
import json
import math
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, time
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from batchrun.errors import DataError, InputMissing, OutputRefused, StorageFailed
from batchrun.plan.batch_requests import CUSTOM_ID
from batchrun.store.durable import remove, storage_errors, sync_file, sync_folder
from batchrun.store.export_format import ExportFormat
from batchrun.store.layout import Layout, read_json
from batchrun.store.result_rows import connect, read_result

_BATCH_ROWS = 8192


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written, and how many rows of it."""

    path: str
    num_rows: int


def export(out: Path, form: ExportFormat, target: Path) -> Exported:
    """Writes the complete result `out` to `target`, which does not exist: a file, or a folder for `datasets`.

    What is needed on the way lies beside `target`, under a name that starts with a dot, and is gone afterwards.

    Raises:
        InputMissing: there is no such job, or it is not complete.
        OutputRefused: `target` exists or cannot be created.
        DataError: the id column is not in the result.
        StorageFailed: the result cannot be read, or the target not be written.
    """
    at = Layout(out)
    at.require_job()
    if not at.is_complete:
        raise InputMissing(f"{out} is not complete; batchrun resume {out} completes it")
    if target.exists():
        raise OutputRefused(f"{target} exists; remove it, or choose another -o")
    if not target.absolute().parent.is_dir():
        raise OutputRefused(f"cannot create {target}: {target.absolute().parent} is no folder; make it first")
    staging, scratch = (target.with_name(f".{target.name}.{secrets.token_hex(4)}") for _ in range(2))
    result = _Result.of(at, scratch)
    try:
        with storage_errors(target), _readable(out):
            scratch.mkdir()
            if form == "datasets":
                _save_dataset(result, staging)
            else:
                lines = _batch_lines(result) if form == "openai-batch" else _plain_lines(result)
                _write_lines(lines, staging)
            staging.rename(target)
            sync_folder(target.absolute().parent)
    finally:
        for path in (staging, scratch):
            remove(path)
    return Exported(str(target), result.num_rows)


@dataclass(frozen=True, slots=True)
class _Result:
    """A complete result: its files, what a job calls things, and whether the files are in the input's order.

    `scratch` is a folder for what exceeds the memory.
    """

    at: Layout
    scratch: Path
    files: tuple[Path, ...]
    job: Mapping[str, Any]
    is_sorted: bool
    num_rows: int

    @classmethod
    def of(cls, at: Layout, scratch: Path) -> "_Result":
        entries = (read_json(at.manifest) or {"files": []})["files"]
        stored = read_json(at.job)
        assert stored is not None, at.job
        return cls(
            at,
            scratch,
            tuple(at.out / entry["name"] for entry in entries),
            stored["job"],
            stored["job"].get("order", "input") == "input" and not any("/" in entry["name"] for entry in entries),
            sum(entry["num_rows"] for entry in entries),
        )

    @property
    def prefix(self) -> str:
        return str(self.job["output_prefix"])

    @property
    def num_samples(self) -> int:
        return int(self.job.get("n", 1))

    @property
    def schema(self) -> pa.Schema:
        with self.batches() as reader:
            return reader.schema

    def batches(self) -> pa.RecordBatchReader:
        """The rows in the input's order."""
        if self.is_sorted:
            schema = pq.read_schema(self.files[0]).remove_metadata()
            return pa.RecordBatchReader.from_batches(schema, self._in_files())
        rows = read_result(connect(self.scratch), self.files)
        index = [f"{self.prefix}row_idx", *([f"{self.prefix}sample_idx"] if self.num_samples > 1 else [])]
        return rows.order(", ".join(f'"{name}"' for name in index)).to_arrow_reader(_BATCH_ROWS)

    def _in_files(self) -> Iterator[pa.RecordBatch]:
        for path in self.files:
            with pq.ParquetFile(path) as file:
                yield from file.iter_batches(batch_size=_BATCH_ROWS)


def _write_lines(lines: Iterable[Mapping[str, Any]], path: Path) -> None:
    with path.open("w", encoding="utf-8") as file:
        for line in lines:
            file.write(json.dumps(line, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n")
    sync_file(path)


def _rows(result: _Result) -> Iterator[dict[str, Any]]:
    for batch in result.batches():
        yield from batch.to_pylist()


def _plain_lines(result: _Result) -> Iterator[dict[str, Any]]:
    """Every row with all of its columns."""
    for row in _rows(result):
        yield {name: _plain(value) for name, value in row.items()}


def _batch_lines(result: _Result) -> Iterator[dict[str, Any]]:
    """Every row as the OpenAI Batch API answers it, its samples as choices; a failed one has an error and no response.

    Of a row of which only some samples failed the others are there.
    """
    names, id_column = result.schema.names, result.job["id_col"]
    if (task := result.job.get("task", "generate")) != "generate":
        raise DataError(f"the openai-batch form has texts that were generated, and the job is of --task {task}")
    if id_column is not None and id_column not in names:
        raise DataError(f"the result has no column {id_column!r}, which is the --id-col; --keep-cols left it out")
    if id_column is None:
        id_column = CUSTOM_ID if CUSTOM_ID in names else f"{result.prefix}row_idx"
    footer = pq.read_schema(result.files[0]).metadata or {}
    model, job_id = (footer.get(key, b"").decode() for key in (b"batchrun.model", b"batchrun.job_id"))
    created = int(result.at.manifest.stat().st_mtime)
    rows = _rows(result)
    for samples in zip(*[rows] * result.num_samples, strict=True):
        first = samples[0]
        answered = [row for row in samples if row[f"{result.prefix}error"] is None]
        error = None if answered else first[f"{result.prefix}error"]
        usage = {
            "prompt_tokens": first[f"{result.prefix}prompt_tokens"],
            "completion_tokens": sum(row[f"{result.prefix}completion_tokens"] for row in samples),
        }
        name = f"{job_id}-{first[f'{result.prefix}row_idx']}"
        body = {
            "id": f"chatcmpl-{name}",
            "object": "chat.completion",
            "created": created,
            "model": model,
            "choices": [
                {
                    "index": row.get(f"{result.prefix}sample_idx", 0),
                    "message": {"role": "assistant", "content": row[f"{result.prefix}text"]},
                    "logprobs": None,
                    "finish_reason": row[f"{result.prefix}finish_reason"],
                }
                for row in answered
            ],
            "usage": usage | {"total_tokens": sum(usage.values())},
        }
        yield {
            "id": f"batch_req_{name}",
            "custom_id": str(first[id_column]),
            "response": None if error else {"status_code": 200, "request_id": f"req_{name}", "body": body},
            "error": {"code": error["type"], "message": error["message"]} if error else None,
        }


def _plain(value: Any) -> Any:
    """The value as JSON has it: times in ISO 8601, bytes in base64, null for what is no number."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {str(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case bytes():
            return base64.b64encode(value).decode()
        case date() | time():
            return value.isoformat()
    return str(value)


def _save_dataset(result: _Result, folder: Path) -> None:
    """As `Dataset.save_to_disk` does; the cache that datasets makes on the way goes to the scratch folder."""
    import datasets

    has_bars = datasets.utils.logging.is_progress_bar_enabled()
    datasets.utils.logging.disable_progress_bar()
    try:
        if not result.num_rows:
            # datasets reads no file without rows, and saves none unless it is told how many.
            features = datasets.Features.from_arrow_schema(result.schema)
            empty = datasets.Dataset.from_dict({name: [] for name in features}, features=features)
            empty.save_to_disk(folder, num_shards=1)
            return
        files = [str(file) for file in result.files]
        if not result.is_sorted:
            files = [str(result.scratch / "ordered.parquet")]
            with result.batches() as reader, pq.ParquetWriter(files[0], reader.schema) as writer:
                for batch in reader:
                    writer.write_batch(batch)
        datasets.Dataset.from_parquet(files, cache_dir=str(result.scratch)).save_to_disk(folder)
    finally:
        if has_bars:
            datasets.utils.logging.enable_progress_bar()


@contextmanager
def _readable(out: Path) -> Iterator[None]:
    """Turns what pyarrow and DuckDB raise about the files of `out` into a StorageFailed."""
    try:
        yield
    except (pa.ArrowException, duckdb.Error) as error:
        raise StorageFailed(f"cannot read {out} ({error}); batchrun verify {out} says more") from error
