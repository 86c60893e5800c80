"""Several samples of every row: the plan has each row of the input as often as it is to be sampled.

With n samples a row, row n * i + s of plan, engine and parts is sample s of row i of the input; the result names both.
The samples of a row are neighbours, so that they share its whole prompt.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchrun.plan.order import OrderedRows

_BATCH_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class Samples:
    """`num` samples of each row of the input; `wanted`: only those with these numbers, None for all."""

    num: int
    wanted: NDArray[np.int64] | None = None

    def of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The numbers of the samples of these rows of the input, in their order."""
        numbers: NDArray[np.int64] = (rows[:, None] * self.num + np.arange(self.num)).reshape(-1)
        return numbers if self.wanted is None else numbers[np.isin(numbers, self.wanted)]

    def spread(self, rows: Iterator[OrderedRows], is_foldable: Callable[[str | None], bool]) -> Iterator[OrderedRows]:
        """The rows of a plan by samples, each of which has one at least; equal answers stay folded."""
        if self.num == 1:
            yield from rows
            return
        for batch in rows:
            sizes = np.cumsum(batch.lengths * self.num) // _BATCH_TOKENS
            for places in np.split(np.arange(len(sizes)), np.flatnonzero(np.diff(sizes)) + 1):
                yield self._spread(batch, places.tolist(), is_foldable)

    def _spread(self, batch: OrderedRows, places: list[int], is_foldable: Callable[[str | None], bool]) -> OrderedRows:
        which, numbers, folded, keep_len = [], [], [], []
        none = np.empty(0, dtype=np.int64)
        for at in places:
            own = self.of(np.concatenate([batch.row_idx[at : at + 1], batch.duplicates[at]]))
            shared = [int(batch.keep_len[at])]
            if is_foldable(batch.params[at]):
                numbers.append(own[:1])
                folded.append(own[1:])
            else:
                numbers.append(own)
                folded += [none] * len(own)
                shared = [int(batch.lengths[at])] * (len(own) - 1) + shared
            which += [at] * len(shared)
            keep_len += shared
        tokens = [batch.tokens[batch.offsets[at] : batch.offsets[at + 1]] for at in which]
        return OrderedRows(
            row_idx=np.concatenate(numbers),
            tokens=np.concatenate(tokens),
            offsets=np.cumsum([0, *map(len, tokens)]),
            keep_len=np.array(keep_len, dtype=np.int32),
            params=[batch.params[at] for at in which],
            duplicates=folded,
        )
