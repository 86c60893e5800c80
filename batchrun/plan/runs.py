"""Sorts byte strings beyond memory: sorted runs on disk, merged by slices.

Knows nothing of what the records mean. Bounded by bytes, not by rows, so that long records cost no more than short
ones; the merge is one list sort a slice, which finds the runs in it and gallops.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa

# What a Python bytes object and its place in a list take besides the bytes.
_OBJECT_BYTES = 48
# The merge holds one slice of every run: memory allows for as many runs as a run has slices.
_SLICES = 1024
_OPTIONS = pa.ipc.IpcWriteOptions(compression="lz4")
_RECORD = pa.field("record", pa.large_binary(), nullable=False)


class ExternalSort:
    """Takes records in any order and gives them back sorted.

    Holds about `memory_bytes` of records at a time, up to a thousand times that in all; a record takes what it takes.
    """

    def __init__(self, folder: Path, memory_bytes: int = 256 << 20) -> None:
        """Runs are written to `folder`, which exists; they stay there for whoever owns it to remove."""
        self._folder = folder
        self._memory_bytes = memory_bytes
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
        """All records in ascending order, in lists of some 100 KiB; the sorter is empty afterwards."""
        if not self._runs:
            self._held.sort()
            held, self._held = self._held, []
            yield from _slices(held, self._memory_bytes // _SLICES)
            return
        if self._held:
            self._spill()
        yield from _merge([_Run(path) for path in self._runs])

    def _spill(self) -> None:
        self._held.sort()
        path = self._folder / f"run-{len(self._runs):05d}.arrow"
        schema = pa.schema([_RECORD])
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema, options=_OPTIONS) as stream:
            for part in _slices(self._held, self._memory_bytes // _SLICES):
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
    while runs := [run for run in runs if run.fill()]:
        bound = min(run.slice[-1] for run in runs)
        merged = [record for run in runs for record in run.take(bound)]
        merged.sort()
        yield merged


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
