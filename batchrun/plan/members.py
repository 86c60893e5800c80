"""The rows of the input behind the rows of a unit, and units of only some of them.

Knows the columns of a unit; nothing of files, prompts or answers.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Members:
    """Every row of the input that a unit answers: the place of the unit's row that does, and its own number.

    A unit's row comes first, then its duplicates; the unit's rows are in order.
    """

    which: NDArray[np.int64]  # [num_input_rows]
    rows: NDArray[np.int64]  # [num_input_rows]


def members(unit: pa.Table) -> Members:
    """The members of a unit (`UNIT_SCHEMA`)."""
    counts = num_members(unit)
    which = np.repeat(np.arange(len(counts)), counts)
    is_first = np.zeros(len(which), dtype=np.bool_)
    is_first[np.cumsum(counts) - counts] = True
    rows = np.empty(len(which), dtype=np.int64)
    rows[is_first] = unit.column("row_idx").to_numpy()
    rows[~is_first] = unit.column("duplicates").combine_chunks().flatten().to_numpy()
    return Members(which, rows)


def num_members(unit: pa.Table) -> NDArray[np.int64]:
    """Rows of the input that each row of a unit answers; int64 [num_rows]."""
    return np.asarray(pc.list_value_length(unit.column("duplicates")).to_numpy(), dtype=np.int64) + 1


def subset(unit: pa.Table, rows: NDArray[np.int64]) -> pa.Table:
    """The unit as if its input had only had `rows`; those that are not in it do not matter.

    What a row shares with the next one that is left is what all between them share.
    """
    every = members(unit)
    is_wanted = np.isin(every.rows, rows)
    places, firsts = np.unique(every.which[is_wanted], return_index=True)
    wanted = every.rows[is_wanted]
    is_first = np.zeros(len(wanted), dtype=np.bool_)
    is_first[firsts] = True
    counts = np.diff(np.append(firsts, len(wanted)))
    ends = np.concatenate([[0], np.cumsum(counts - 1)])
    duplicates = pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(wanted[~is_first]))
    keep_len = unit.column("keep_len").to_numpy()
    shared = np.minimum.reduceat(keep_len, places) if len(places) else keep_len[:0]
    left = unit.take(places)
    for name, column in (
        ("row_idx", pa.array(wanted[firsts])),
        ("keep_len", pa.array(shared)),
        ("duplicates", duplicates),
    ):
        at = unit.schema.get_field_index(name)
        left = left.set_column(at, unit.schema.field(at), column)
    return left
