"""The rows of all parts in the order of their index, whatever order they were computed in, in bounded memory.

An external sort by runs: parts are read until a run is full, the run is sorted and spilled as one Arrow file, and
the spilled runs are read back through the page cache, each from its start to its end.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchrun.store.durable import storage_errors
from batchrun.store.layout import Part
from batchrun.store.parts import read_part

# A run is held about three times while it is sorted.
_RUN_BYTES = 128 << 20


class MergedParts:
    """All rows of the parts by row index. Every row is handed out once, by one `take`."""

    def __init__(self, parts: Iterable[Part], schema: pa.Schema, spill: Path, run_bytes: int = _RUN_BYTES) -> None:
        """Reads and sorts all parts; `spill` is an existing folder for the runs when there is more than one.

        Raises PartDamaged for a part that cannot be read and StorageFailed when the runs cannot be written.
        """
        self._schema = schema
        self._runs: list[_Run] = []
        for table in _runs(parts, schema, run_bytes):
            # The last run stays in memory: it is the only one that can be smaller, and of a small job the only one.
            is_last = table.nbytes < run_bytes
            self._runs.append(_Run(table if is_last else _spill(table, spill / f"run-{len(self._runs):05d}.arrow")))

    def take(self, stop: int) -> pa.Table:
        """The rows not taken yet whose index is below `stop`, by index; equal indices are neighbours."""
        taken = pa.concat_tables([self._schema.empty_table(), *(run.take(stop) for run in self._runs)])
        taken = taken.combine_chunks()
        return taken.take(np.argsort(row_indices(taken), kind="stable"))

    def find(self, rows: NDArray[np.int64]) -> pa.Table:
        """The rows with these indices, ascending, as far as they are there; whether they were taken does not matter."""
        found = pa.concat_tables([self._schema.empty_table(), *(run.find(rows) for run in self._runs)])
        return found.take(np.argsort(row_indices(found), kind="stable"))

    @property
    def num_left(self) -> int:
        """Rows not taken yet."""
        return sum(run.num_left for run in self._runs)


def row_indices(table: pa.Table) -> NDArray[np.int64]:
    """The first column of a table of results; int64 [num_rows]."""
    return np.asarray(table.column(0).to_numpy(), dtype=np.int64)


@dataclass(slots=True)
class _Run:
    """A sorted table and how far it has been read."""

    table: pa.Table
    position: int = 0

    @property
    def num_left(self) -> int:
        return int(self.table.num_rows) - self.position

    def take(self, stop: int) -> pa.Table:
        start = self.position
        # A view of a memory-mapped column: the search touches a few pages, not the whole run.
        self.position = int(np.searchsorted(row_indices(self.table), stop))
        return self.table.slice(start, self.position - start)

    def find(self, rows: NDArray[np.int64]) -> pa.Table:
        own = row_indices(self.table)
        places = np.searchsorted(own, rows)
        inside = places < len(own)
        places, wanted = places[inside], rows[inside]
        return self.table.take(places[own[places] == wanted])


def _runs(parts: Iterable[Part], schema: pa.Schema, run_bytes: int) -> Iterator[pa.Table]:
    """Sorted tables of about `run_bytes` each; only the last one is smaller."""
    pieces: list[pa.Table] = []
    num_bytes = 0
    for part in parts:
        pieces.append(read_part(part, schema))
        num_bytes += pieces[-1].nbytes
        if num_bytes >= run_bytes:
            yield _sorted(pieces)
            pieces, num_bytes = [], 0
    if pieces:
        yield _sorted(pieces)


def _sorted(pieces: list[pa.Table]) -> pa.Table:
    table = pa.concat_tables(pieces).combine_chunks()
    return table.take(np.argsort(row_indices(table), kind="stable")).combine_chunks()


def _spill(table: pa.Table, path: Path) -> pa.Table:
    """Writes `table` and returns it as a memory map, so that the pages can go when memory is short."""
    with storage_errors(path):
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
        # Closing the file keeps the map: a job of any size needs no more than one descriptor.
        with pa.memory_map(str(path)) as mapped:
            return pa.ipc.open_file(mapped).read_all()
