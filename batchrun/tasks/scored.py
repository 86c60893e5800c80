"""What all tasks have in common which read a row instead of continuing it: their usual columns, and rows of them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from batchrun.engine.request import Completion
from batchrun.errors import RowError
from batchrun.tasks.generate import ERROR_TYPE, PlannedRow

_FIRST = [pa.field("row_idx", pa.int64(), nullable=False)]
_LAST = [
    pa.field("prompt_tokens", pa.int32(), nullable=False),
    pa.field("cached_tokens", pa.int32(), nullable=False),
    pa.field("error", ERROR_TYPE),
]


class ReadingTask:
    """What all such tasks have in common: a row is read once, and nothing in it can be resumed or refused."""

    num_samples = 1
    num_beams = 1
    can_resume = True

    def refusal(self, row: PlannedRow) -> RowError | None:
        """A row that was planned can be read."""
        return None

    def checked(self, row: PlannedRow, completion: Completion) -> Completion:
        """What was read is what it is."""
        return completion


def with_usual(own: Sequence[tuple[str, pa.DataType]]) -> pa.Schema:
    """A task's own columns, null for rows that failed, between those of all."""
    return pa.schema([*_FIRST, *(pa.field(name, kind) for name, kind in own), *_LAST])


def result_rows(
    row: PlannedRow, completions: Sequence[Completion], own: Mapping[str, Any], cached_tokens: int, prompt_tokens: int
) -> Iterator[dict[str, Any]]:
    """A result row for a planned row and each of its duplicates; without `own` where a completion failed."""
    error = next((one.error for one in completions if one.error is not None), None)
    for row_idx in (row.row_idx, *row.duplicates):
        yield {
            "row_idx": row_idx,
            **({} if error is not None else own),
            "prompt_tokens": prompt_tokens,
            "cached_tokens": cached_tokens,
            "error": None if error is None else {"type": error.type, "message": error.message},
        }
