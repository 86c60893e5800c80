"""Columns of token ids: prompts, and texts to score, that were tokenised before. They are taken as they are.

Knows nothing of text.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from batchrun.errors import RowError
from batchrun.plan.cells import row_numbers

if TYPE_CHECKING:
    from batchrun.engine.request import TokenIds


def is_token_ids(kind: pa.DataType) -> bool:
    """Whether a column of this type holds lists of whole numbers."""
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return bool(is_list and pa.types.is_integer(kind.value_type) and kind.value_type != pa.uint64())


class TokensColumn:
    """The column's token ids; a prompt source."""

    def __init__(self, name: str, vocab_size: int) -> None:
        self._name = name
        self._vocab_size = vocab_size
        self.columns: tuple[str, ...] = (name,)
        self.label = f"token ids in column {name!r}"

    def read(self, batch: pa.RecordBatch) -> "list[TokenIds | RowError]":
        """The ids of each row, one at least and all of them the model's, or the reason why it has none."""
        column = batch.column(batch.schema.get_all_field_indices(self._name)[-1])
        column = column.cast(pa.large_list(pa.int64()))
        # Outside of every vocabulary.
        values = column.values.fill_null(-1).to_numpy()
        offsets, is_valid = column.offsets.to_numpy().tolist(), column.is_valid().to_pylist()
        return [
            self._ids(row, values[begin:end] if valid else None)
            for row, begin, end, valid in zip(
                row_numbers(batch).tolist(), offsets[:-1], offsets[1:], is_valid, strict=True
            )
        ]

    def _ids(self, row: int, ids: "np.ndarray[tuple[int], np.dtype[np.int64]] | None") -> "TokenIds | RowError":
        if ids is None or not len(ids):
            what = "null" if ids is None else "empty"
            return RowError(
                "empty_prompt", f"row {row}: column {self._name!r} is {what}; fill it or filter the row out"
            )
        strange = ids[(ids < 0) | (ids >= self._vocab_size)]
        if len(strange):
            what = "a null" if strange[0] == -1 else f"the token {strange[0]}"
            message = f"row {row}: column {self._name!r} has {what}, and the model's are 0 to {self._vocab_size - 1:,}"
            return RowError("invalid_params", f"{message}; tokenise it for this model")
        return ids.astype(np.int32)


class TargetTokens:
    """The column's token ids behind a prompt of token ids; continuations, one a row."""

    def __init__(self, name: str, vocab_size: int) -> None:
        self._column = TokensColumn(name, vocab_size)
        self.columns = self._column.columns
        self.label = f"target: {self._column.label}"

    def read(self, batch: pa.RecordBatch) -> "list[tuple[TokenIds, ...] | RowError]":
        """The ids of each row."""
        return [self._target(ids) for ids in self._column.read(batch)]

    def _target(self, ids: "TokenIds | RowError") -> "tuple[TokenIds, ...] | RowError":
        if not isinstance(ids, RowError):
            return (ids,)
        return replace(ids, type="empty_target") if ids.type == "empty_prompt" else ids
