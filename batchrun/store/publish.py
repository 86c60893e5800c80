"""From parts to OUT: results joined with the input's columns, proved complete, in one rename.

Reads the input a second time, in step with the sorted results or into a file that is mapped, so that memory does not
grow with the job. Knows nothing of models or prompts.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchrun.errors import StorageFailed
from batchrun.store.durable import new_name, remove, storage_errors, sync_folder, write_file
from batchrun.store.merge import MergedParts, row_indices
from batchrun.store.parts import JOB_ID_KEY, read_part, read_row_idx
from batchrun.store.result_files import ResultFiles, Shape, as_read
from batchrun.store.samples import published, split
from batchrun.store.store import Store

_WINDOW_ROWS = 16_384
_NUM_NAMED = 5


@dataclass(frozen=True, slots=True)
class Publication:
    """What appeared at OUT."""

    output: Path
    num_rows: int
    num_files: int


def publish(
    store: Store,
    batches: Iterable[pa.RecordBatch],
    kept: pa.Schema,
    results: pa.Schema,
    metadata: Mapping[str, str],
    shape: Shape | None = None,
    num_samples: int = 1,
) -> Publication:
    """Writes OUT: the `kept` columns of the input, then the `results` columns of the parts; every input row once.

    Or `num_samples` times, once for each sample.

    `batches` are the input's rows in input order: the row's index first (0, 1, …), then at least the `kept` columns.
    `results` is the parts' schema, the row's index first. `metadata` goes into every file's footer beside the job's
    id. OUT appears in one rename; a crash before it leaves the parts, and publishing starts again.

    Raises:
        StorageFailed: rows lack a result, or have several, or belong to no input row (the message names them), a
            part is damaged, or the disk failed. OUT is as it was.
        OutputRefused: something else has appeared at OUT.
    """
    staging, spill = (new_name(store.tmp, name) for name in ("publish", "runs"))
    try:
        with storage_errors(staging):
            staging.mkdir()
            spill.mkdir()
        shape = shape or Shape()
        footer = {**metadata, JOB_ID_KEY: store.job_id}
        columns = [*kept, *published(results, num_samples)]
        files = ResultFiles(staging, pa.schema(columns, metadata=footer), shape)
        join = _in_input_order if shape.order == "input" else _as_answered
        num_rows = 0
        for columns in join(store, batches, kept, results, spill, num_samples):
            files.append(columns)
            num_rows += len(columns[0])
        written = files.close()
        _expose(store, staging, written, as_read(files.schema), shape.order)
        return Publication(store.at.out, num_rows, len(written))
    finally:
        # Also after a full disk: what cannot be published must not hold the space that the next try needs.
        for folder in (staging, spill):
            # What cannot be removed now is swept by whoever takes the lock next.
            with suppress(OSError):
                remove(folder)


def _in_input_order(
    store: Store, batches: Iterable[pa.RecordBatch], kept: pa.Schema, results: pa.Schema, spill: Path, num_samples: int
) -> Iterator[list[pa.Array | pa.ChunkedArray]]:
    """The columns of OUT, some rows at a time; the results are sorted for it."""
    merged = MergedParts(store.at.list_parts(), results, spill)
    num_rows = 0
    for window in _windows(batches, max(_WINDOW_ROWS // num_samples, 1)):
        stop = num_rows + window.num_rows * num_samples
        rows = merged.take(stop)
        _prove(store, row_indices(rows), num_rows, stop, num_samples)
        repeated = _kept_columns(window, kept, num_rows // num_samples, num_samples)
        yield [*repeated, *split(rows, num_samples).columns]
        num_rows = stop
    if merged.num_left:
        raise _foreign_rows(merged.num_left, f"from row_idx {num_rows // num_samples} on")


def _as_answered(
    store: Store, batches: Iterable[pa.RecordBatch], kept: pa.Schema, results: pa.Schema, spill: Path, num_samples: int
) -> Iterator[list[pa.Array | pa.ChunkedArray]]:
    """The same, a part at a time as it is; the input's columns are looked up for it."""
    inputs = _mapped(batches, kept, spill / "input.arrow")
    is_found = np.zeros(len(inputs) * num_samples, dtype=np.bool_)
    for part in store.at.list_parts():
        table = read_part(part, results)
        rows = row_indices(table)
        strangers = rows[(rows < 0) | (rows >= len(is_found))]
        if len(strangers):
            raise _foreign_rows(len(strangers), f"row_idx {_named(strangers, num_samples)}")
        if is_found[rows].any() or len(np.unique(rows)) < len(rows):
            values, counts = np.unique(rows, return_counts=True)
            raise _duplicates(store, values[is_found[values] | (counts > 1)], num_samples)
        is_found[rows] = True
        yield [*inputs.take(pa.array(rows // num_samples)).columns, *split(table, num_samples).columns]
    if not is_found.all():
        raise _missing_rows(np.flatnonzero(~is_found), num_samples)


def _mapped(batches: Iterable[pa.RecordBatch], kept: pa.Schema, path: Path) -> pa.Table:
    """The columns to keep, in a file instead of in memory."""
    num_rows = 0
    with storage_errors(path):
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, kept) as writer:
            for window in _windows(batches, _WINDOW_ROWS):
                columns = _kept_columns(window, kept, num_rows, num_samples=1)
                writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=kept))
                num_rows += window.num_rows
        with pa.memory_map(str(path)) as mapped:
            return pa.ipc.open_file(mapped).read_all()


def _windows(batches: Iterable[pa.RecordBatch], at_most: int) -> Iterator[pa.RecordBatch]:
    """The batches, cut so that a window of long results stays small."""
    for batch in batches:
        for start in range(0, batch.num_rows, at_most):
            yield batch.slice(start, at_most)


def _kept_columns(window: pa.RecordBatch, kept: pa.Schema, start: int, num_samples: int) -> list[pa.Array]:
    """The columns to keep, each row `num_samples` times; by position, since an input column may be called like the
    row's index."""
    index = np.asarray(window.column(0).to_numpy(), dtype=np.int64)
    expected = np.arange(start, start + window.num_rows)
    assert np.array_equal(index, expected), f"input rows {index[:3]}… where {start}… was due"
    if num_samples > 1:
        window = window.take(pa.array(np.repeat(np.arange(window.num_rows), num_samples)))
    names = window.schema.names[1:]
    return [window.column(1 + names.index(name)) for name in kept.names]


def _prove(store: Store, found: NDArray[np.int64], start: int, stop: int, num_samples: int) -> None:
    """Raises StorageFailed unless `found`, which is sorted, is exactly start … stop - 1; names rows of the input."""
    expected = np.arange(start, stop)
    if np.array_equal(found, expected):
        return
    repeated = found[1:][found[1:] == found[:-1]]
    if len(repeated):
        raise _duplicates(store, np.unique(repeated), num_samples)
    strangers = np.setdiff1d(found, expected)
    if len(strangers):
        raise _foreign_rows(len(strangers), f"row_idx {_named(strangers, num_samples)}")
    raise _missing_rows(np.setdiff1d(expected, found), num_samples)


def _missing_rows(missing: NDArray[np.int64], num_samples: int) -> StorageFailed:
    return StorageFailed(
        f"no result for row_idx {_named(missing, num_samples)}: the input has rows that are in no part; "
        "run the same command again to compute them"
    )


def _duplicates(store: Store, rows: NDArray[np.int64], num_samples: int) -> StorageFailed:
    parts = store.at.list_parts()
    holding = [part.path.name for part in parts if rows[0] in read_row_idx(part, store.job_id)]
    return StorageFailed(
        f"more than one result for row_idx {_named(rows, num_samples)}, in {', '.join(holding)} of {store.at.parts}; "
        "delete the later part and run the same command again"
    )


def _foreign_rows(num_rows: int, which: str) -> StorageFailed:
    return StorageFailed(
        f"{num_rows} results ({which}) belong to no row of the input: it has changed since it was planned; "
        "restore it, or --overwrite to start again"
    )


def _named(numbers: NDArray[np.int64], num_samples: int) -> str:
    rows = np.unique(numbers // num_samples)
    shown = ", ".join(str(row) for row in rows[:_NUM_NAMED])
    return shown if len(rows) <= _NUM_NAMED else f"{shown} … ({len(rows)} rows)"


def _expose(store: Store, staging: Path, written: list[dict[str, str | int]], schema: pa.Schema, order: str) -> None:
    """From a finished folder to OUT. Before the rename to `ready` nothing is published; after it, OUT will be."""
    at = store.at
    # Whoever has taken the job over meanwhile swept `staging` if it was there before, and is told here if it was not.
    store.check_lease()
    with storage_errors(at.folder):
        # The folders' names before their own; the files were synced one by one.
        for folder in (*(path for path in staging.iterdir() if path.is_dir()), staging):
            sync_folder(folder)
        columns = {field.name: str(field.type) for field in schema}
        manifest = {"files": written, "schema": columns, "order": order}
        # Before `ready`, so that a published OUT always has its manifest; without OUT a manifest means nothing.
        write_file(at.manifest, json.dumps(manifest, indent=1).encode(), store.tmp)
        staging.rename(at.ready)
        sync_folder(at.folder)
    store.reveal()
