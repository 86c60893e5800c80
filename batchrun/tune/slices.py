"""What is kept of a plan that is too large to be simulated row by row: sums over slices of neighbouring rows.

Read in one pass without the tokens themselves, in memory that does not grow with the plan.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchrun.plan.plan import read_unit
from batchrun.tune.imagined import Outputs

if TYPE_CHECKING:
    from batchrun.plan.plan import Plan

_MOST_SLICES = 1 << 14

Counts = NDArray[np.int64]  # [num_slices]


@dataclass(frozen=True, slots=True)
class Slices:
    """A plan's rows in slices of equally many, in plan order; tokens, and of outputs those that are expected.

    `alone_tokens` are those to compute of the prompts in an engine that has seen no row before the slice. The first row
    shares `shared_len` with the row before it, and no row less than `least_shared` with the one before itself.
    """

    num_rows: Counts
    prompt_tokens: Counts
    alone_tokens: Counts
    shared_len: Counts
    least_shared: Counts
    output_tokens: Counts
    longest_output: Counts

    @property
    def prompt_work(self) -> Counts:
        """Tokens to compute of the prompts where the slice before is there."""
        return self.alone_tokens - self.shared_len

    @property
    def output_work(self) -> Counts:
        """Tokens to compute of the outputs: the last one of a row never is."""
        return self.output_tokens - self.num_rows


def read_slices(plan: "Plan", outputs: Outputs) -> Slices:
    """Raises StorageFailed when the plan cannot be read."""
    num_rows = plan.summary.num_unique
    size = max(1, -(-num_rows // _MOST_SLICES))
    num_slices = -(-num_rows // size)
    sums = np.zeros((5, num_slices), dtype=np.int64)
    least = np.full(num_slices, np.iinfo(np.int32).max, dtype=np.int64)
    longest = np.zeros(num_slices, dtype=np.int64)
    first = before = 0
    for unit in plan.units:
        if not unit.num_tokens:
            continue
        table = read_unit(unit)
        lengths = _lengths(table.column("token_ids"))
        keep_len = table.column("keep_len").to_numpy().astype(np.int64)
        shared, before = np.concatenate([[before], keep_len[:-1]]), int(keep_len[-1])
        expected = _expected(table.column("params"), lengths, outputs)
        which = (first + np.arange(len(lengths))) // size
        starts = np.flatnonzero(np.diff(which, prepend=-1))
        into = which[starts]
        is_first = (first + np.arange(len(lengths))) % size == 0
        columns = (np.ones_like(lengths), lengths, lengths - shared, expected, shared * is_first)
        for total, column in zip(sums, columns, strict=True):
            total[into] += np.add.reduceat(column, starts)
        least[into] = np.minimum(least[into], np.minimum.reduceat(shared, starts))
        longest[into] = np.maximum(longest[into], np.maximum.reduceat(expected, starts))
        first += len(lengths)
    counted, prompts, unshared, expected_sums, first_shared = sums
    return Slices(counted, prompts, unshared + first_shared, first_shared, least, expected_sums, longest)


def _lengths(column: pa.ChunkedArray) -> Counts:
    """Of the lists in a column, without what is in them."""
    return np.concatenate([np.diff(chunk.offsets.to_numpy()) for chunk in column.chunks]).astype(np.int64)


def _expected(params: pa.ChunkedArray, lengths: Counts, outputs: Outputs) -> Counts:
    """Tokens that each row is expected to generate."""
    coded = params.combine_chunks().dictionary_encode(null_encoding="encode")
    lens = [outputs.of_params(text) for text in coded.dictionary.to_pylist()]
    expected = np.array([each.expected for each in lens])[coded.indices.to_numpy()]
    return np.asarray(np.minimum(expected, outputs.room - lengths))
