"""Sorts byte strings beyond memory: sorted runs on disk, merged by slices.

Knows nothing of what the records mean. Bounded by bytes, not by rows, so that long records cost no more than short
ones; the merge is one list sort a slice, which finds the runs in it and gallops.
"""

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa

# What a Python bytes object and its place in a list take besides the bytes.
_OBJECT_BYTES = 48
_SLICES_YIELDED = 16
_OPTIONS = pa.ipc.IpcWriteOptions(compression="lz4")
_RECORD = pa.field("record", pa.large_binary(), nullable=False)


class ExternalSort:
    """Takes records in any order and gives them back sorted.

    Holds about `memory_bytes` of records while it takes them, and `slice_bytes` for each such run while it merges:
    as much again when there is a thousand times `memory_bytes` to sort.
    """

    def __init__(self, folder: Path, memory_bytes: int = 256 << 20, slice_bytes: int = 256 << 10) -> None:
        """Runs are written to `folder`, which exists; they stay there for whoever owns it to remove."""
        self._folder = folder
        self._memory_bytes = memory_bytes
        self._slice_bytes = slice_bytes
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._runs: list[Path] = []

    def add(self, records: Iterable[bytes]) -> None:
        """Takes more records; may write a run."""
        before = len(self._held)
        self._held.extend(records)
        new = self._held[before:]
        self._held_bytes += sum(map(len, new)) + _OBJECT_BYTES * len(new)
        if self._held_bytes >= self._memory_bytes:
            self._spill()

    def drain(self) -> Iterator[list[bytes]]:
        """All records in ascending order, in lists of about 16 slices; the sorter is empty afterwards."""
        if not self._runs:
            self._held.sort()
            held, self._held = self._held, []
            yield from _slices(held, self._slice_bytes * _SLICES_YIELDED)
            return
        if self._held:
            self._spill()
        yield from _merge([_Run(path) for path in self._runs])

    def _spill(self) -> None:
        self._held.sort()
        path = self._folder / f"run-{len(self._runs):05d}.arrow"
        schema = pa.schema([_RECORD])
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema, options=_OPTIONS) as stream:
            for part in _slices(self._held, self._slice_bytes):
                stream.write_batch(pa.RecordBatch.from_arrays([pa.array(part, _RECORD.type)], schema=schema))
        self._runs.append(path)
        self._held = []
        self._held_bytes = 0


class _Run:
    """A sorted run being read: `slice` from `position` on is what is left of the part in memory."""

    def __init__(self, path: Path) -> None:
        self._batches = pa.ipc.open_stream(pa.OSFile(str(path), "rb"))
        self.slice: list[bytes] = []
        self.position = 0

    def fill(self) -> bool:
        """Makes sure that the slice has a record left; False at the end of the run."""
        while self.position == len(self.slice):
            batch = next(self._batches, None)
            if batch is None:
                return False
            self.slice = batch.column(0).to_pylist()
            self.position = 0
        return True

    def take(self, bound: bytes) -> list[bytes]:
        """The records up to and with `bound` out of the slice."""
        end = bisect_right(self.slice, bound, self.position)
        taken = self.slice[self.position : end]
        self.position = end
        return taken


def _merge(runs: list[_Run]) -> Iterator[list[bytes]]:
    """Everything up to the smallest last record of the slices is in them: it can go, and one slice is then used up."""
    gathered: list[bytes] = []
    for step in itertools.count(1):
        runs = [run for run in runs if run.fill()]
        if not runs:
            break
        bound = min(run.slice[-1] for run in runs)
        merged = [record for run in runs for record in run.take(bound)]
        merged.sort()
        gathered += merged
        if step % _SLICES_YIELDED == 0:
            yield gathered
            gathered = []
    if gathered:
        yield gathered


def _slices(records: list[bytes], num_bytes: int) -> Iterator[list[bytes]]:
    """Consecutive slices of about `num_bytes`, at least one record each."""
    start = size = 0
    for index, record in enumerate(records):
        size += len(record)
        if size >= num_bytes:
            yield records[start : index + 1]
            start, size = index + 1, 0
    if start < len(records):
        yield records[start:]
