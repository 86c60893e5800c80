"""What the committed rows of a job look like: lengths, why they ended, what went wrong. Read from the parts."""

from collections import Counter, defaultdict
from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from batchrun.errors import StorageFailed
from batchrun.store.counts import read_counts

_EXAMPLES_OF_A_TYPE = 3


@dataclass(frozen=True, slots=True)
class FailedRow:
    """One row without an answer."""

    row_idx: int
    type: str
    message: str


@dataclass(frozen=True, slots=True)
class Results:
    """`prompt_lengths[n]` rows have a prompt of n tokens, `output_lengths` likewise; failed rows are in neither.

    `errors` has a few rows for each type of error.
    """

    prompt_lengths: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    output_lengths: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    finish_reasons: dict[str, int] = field(default_factory=dict)
    errors: tuple[FailedRow, ...] = ()


def read_results(parts: list[Path], prefix: str, num_errors: Mapping[str, int], num_samples: int = 1) -> Results:
    """The rows in `parts`, whose columns are named with `prefix`; `num_errors` is how many failed, by type.

    Each row of the input is there `num_samples` times.

    Raises StorageFailed when a part cannot be read.
    """
    if not parts:
        return Results()
    try:
        prompt_lengths, output_lengths, reasons = _lengths(parts, prefix)
        errors = tuple(_errors(parts, prefix, num_errors, num_samples))
        return Results(prompt_lengths, output_lengths, dict(reasons), errors)
    except (OSError, pa.ArrowException) as error:
        raise StorageFailed(f"cannot read the parts in {parts[0].parent}: {error}") from error


def _lengths(parts: list[Path], prefix: str) -> tuple[NDArray[np.int64], NDArray[np.int64], Counter[str]]:
    prompts = outputs = np.zeros(1, np.int64)
    reasons = Counter[str]()
    columns = [prefix + name for name in ("prompt_tokens", "error", "completion_tokens", "finish_reason")]
    for batch in _batches(parts, columns):
        # The last two are there where text was generated.
        prompt_tokens, error, *generated = (batch.column(name) for name in columns if name in batch.schema.names)
        is_good = error.is_null()
        prompts = _added(prompts, prompt_tokens.filter(is_good).to_numpy(zero_copy_only=False))
        if generated:
            output_tokens, reason = generated
            for counted in reason.value_counts().to_pylist():
                reasons[counted["values"]] += counted["counts"]
            outputs = _added(outputs, output_tokens.filter(is_good).to_numpy(zero_copy_only=False))
    return prompts, outputs, reasons


def _batches(parts: list[Path], columns: list[str]) -> Generator[pa.RecordBatch]:
    for part in parts:
        with pq.ParquetFile(part) as file:
            yield from file.iter_batches(columns=columns, use_threads=False)


def _added(counts: NDArray[np.int64], lengths: NDArray[np.int32]) -> NDArray[np.int64]:
    more = np.bincount(lengths, minlength=len(counts))
    more[: len(counts)] += counts
    return more


def _errors(parts: list[Path], prefix: str, num_errors: Mapping[str, int], num_samples: int) -> list[FailedRow]:
    """A few rows of each type; looks no further when it has them."""
    if not num_errors:
        return []
    wanted = {name: min(count, _EXAMPLES_OF_A_TYPE) for name, count in num_errors.items()}
    found: defaultdict[str, list[FailedRow]] = defaultdict(list)
    columns = [prefix + name for name in ("row_idx", "error")]
    # Closed here: of a reader that is left in the middle and collected later, nobody would hear what failed.
    with closing(_batches([part for part in parts if read_counts(part).failed], columns)) as batches:
        for batch in batches:
            failed_rows = batch.filter(batch.column(columns[1]).is_valid())
            for row_idx, error in zip(*(failed_rows.column(name) for name in columns), strict=True):
                failed = FailedRow(row_idx.as_py() // num_samples, **error.as_py())
                if len(found[failed.type]) < _EXAMPLES_OF_A_TYPE:
                    found[failed.type].append(failed)
            if all(len(found[name]) >= count for name, count in wanted.items()):
                break
    return [row for name in sorted(found, key=lambda name: -num_errors.get(name, 0)) for row in found[name]]
