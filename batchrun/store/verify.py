"""The proof, after the fact and from the disk alone, that OUT is complete and undamaged.

Reads every byte of OUT once; trusts neither the footers nor the process that wrote it.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from batchrun.store import counts
from batchrun.store.layout import Layout, read_json
from batchrun.store.samples import numbers, sample_column
from batchrun.store.status import num_planned

_BATCH_ROWS = 16_384


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was found; `problems` is empty exactly when every planned row is in OUT once, in order and undamaged."""

    output: str
    num_rows: int
    num_planned: int | None
    num_failed: int
    num_files: int
    problems: tuple[str, ...]

    @property
    def is_ok(self) -> bool:
        return not self.problems


def verify(out: Path, index_column: str = "row_idx", num_samples: int = 1) -> VerifyReport:
    """Checks OUT against its manifest and its plan: digests, the schema, row indices 0, 1, … n - 1 in order.

    With several samples a row, these too. Where OUT has folders by a column's values, the order is that within each
    folder; where rows are to be in the order that they were answered in, any is right.

    Raises:
        InputMissing: there is no such job.
        StorageFailed: the job folder itself cannot be read.
    """
    at = Layout(out)
    at.require_job()
    planned, done = num_planned(at), counts.total(at.list_parts())
    if not at.is_complete:
        if at.out.exists() and planned is not None and done.rows >= planned:
            problem = f"{out} has lost files; move it away and run the same command again: every row's result is kept"
            return VerifyReport(str(out), done.rows, planned, done.failed, 0, (problem,))
        of = "an unknown number of" if planned is None else planned
        problem = f"{out} is not complete: {done.rows:,} of {of} rows have a result; batchrun resume {out} goes on"
        return VerifyReport(str(out), done.rows, planned, done.failed, 0, (problem,))
    expected, schema, order = _expected(at)
    is_partitioned = any("/" in name for name in expected)
    scan = _Scan(index_column, num_samples, schema, order, is_partitioned=is_partitioned)
    for name, entry in expected.items():
        scan.read(at.out / name, entry)
    scan.look_for_others(at.out, {at.out / name for name in expected})
    scan.finish(planned)
    if scan.problems:
        scan.problems.append(f"move {out} away and run the same command again: every row's result is kept")
    return VerifyReport(str(out), scan.num_rows, planned, done.failed, scan.num_files, tuple(scan.problems))


def _expected(at: Layout) -> tuple[dict[str, dict[str, Any]], dict[str, str] | None, str]:
    """The files by name, the types of their columns by name, where the manifest has them, and the rows' order."""
    manifest = read_json(at.manifest) or {"files": []}
    return (
        {str(entry["name"]): entry for entry in manifest["files"]},
        manifest.get("schema"),
        manifest.get("order", "input"),
    )


class _Scan:
    """Reads the files of OUT one after the other and collects what is wrong, one line a problem."""

    def __init__(
        self, index_column: str, num_samples: int, schema: dict[str, str] | None, order: str, *, is_partitioned: bool
    ) -> None:
        self._index_column = index_column
        self._num_samples = num_samples
        self._schema = schema
        self._is_sorted = order == "input"
        self._rows: list[NDArray[np.int64]] | None = [] if is_partitioned or not self._is_sorted else None
        self._folder: Path | None = None
        self.problems: list[str] = []
        self.num_files = 0
        self.num_rows = 0
        self.next_row = 0

    def read(self, path: Path, expected: dict[str, Any]) -> None:
        self.num_files += 1
        try:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != expected["sha256"]:
                self.problems.append(f"{path} has been changed since it was written (its sha256 differs)")
            self._read_rows(path)
        except FileNotFoundError:
            self.problems.append(f"{path} is missing")
        except (pa.ArrowException, OSError) as error:
            self.problems.append(f"{path} cannot be read: {str(error).splitlines()[0]}")

    def look_for_others(self, out: Path, expected: set[Path]) -> None:
        try:
            found = {path for path in out.rglob("*") if not path.is_dir()}
        except OSError as error:
            self.problems.append(f"{out} cannot be listed: {error.strerror}")
            return
        self.problems += [f"{path} is not part of the result; move it away" for path in sorted(found - expected)]

    def _read_rows(self, path: Path) -> None:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            schema = {field.name: str(field.type) for field in file.schema_arrow}
            if self._schema is not None and list(schema.items()) != list(self._schema.items()):
                self.problems.append(f"{path} has other columns than were written: {_difference(schema, self._schema)}")
            self._schema = self._schema or schema
            index = [self._index_column, *([sample_column(self._index_column)] if self._num_samples > 1 else [])]
            if missing := [name for name in index if name not in schema]:
                self.problems.append(f"{path} has no column {missing[0]}")
                return
            for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                self._check(path, numbers(batch, self._index_column, self._num_samples))

    def finish(self, planned: int | None) -> None:
        """Whether all rows were found; every one of `planned` once."""
        if self._rows is not None:
            rows = np.sort(np.concatenate([np.empty(0, np.int64), *self._rows]))
            if not np.array_equal(rows, np.arange(len(rows))):
                self.problems.append("a row is there twice or missing")
            self.next_row = len(rows)
        if planned is not None and self.next_row != planned:
            self.problems.append(f"{self.next_row} rows instead of the {planned} that were planned")

    def _check(self, path: Path, rows: NDArray[np.int64]) -> None:
        if self._rows is not None:
            self._check_order(path, rows)
            return
        wrong = np.flatnonzero(rows != np.arange(self.next_row, self.next_row + len(rows)))
        if len(wrong):
            due = self.next_row + int(wrong[0])
            found, expected = (self._named(row) for row in (int(rows[wrong[0]]), due))
            self.problems.append(f"{path}: row_idx {found} where {expected} was due")
        self.num_rows += len(rows)
        # From what was found: one row too many or too few is one problem, not one for every batch after it.
        self.next_row = int(rows[-1]) + 1 if len(rows) else self.next_row

    def _named(self, row: int) -> str:
        index, sample = divmod(row, self._num_samples)
        return f"{index}" + (f", sample_idx {sample}" if self._num_samples > 1 else "")

    def _check_order(self, path: Path, rows: NDArray[np.int64]) -> None:
        """In a folder of its own: ascending; whether all are there is seen at the end."""
        assert self._rows is not None
        before = self._rows[-1][-1:] if self._rows and path.parent == self._folder else rows[:0]
        if self._is_sorted and (np.diff(np.concatenate([before, rows])) <= 0).any():
            self.problems.append(f"{path}: rows are not in the input's order")
        self._folder = path.parent
        self._rows.append(rows)
        self.num_rows += len(rows)


def _difference(found: dict[str, str], expected: dict[str, str]) -> str:
    names = [name for name in {**expected, **found} if found.get(name) != expected.get(name)]
    what = [f"{name} {found.get(name, 'missing')} instead of {expected.get(name, 'none')}" for name in names]
    return ", ".join(what) or "in another order"
