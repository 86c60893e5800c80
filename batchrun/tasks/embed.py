"""The task of embedding: a row's hidden state behind the model's last norm, as a vector."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from batchrun.engine.request import Completion, PooledHidden, Pooling, Request
from batchrun.job import Job
from batchrun.tasks.generate import PlannedRow, prefixed
from batchrun.tasks.scored import ReadingTask, result_rows, with_usual


def columns(hidden_size: int) -> pa.Schema:
    """The result's, of a model with hidden states of that size."""
    return with_usual([("embedding", pa.list_(pa.float32(), hidden_size))])


def cached_len(shared_len: int, pooling: Pooling) -> int:
    """Tokens of a row that another's serve: a mean is over states that sharing would not compute."""
    return shared_len if pooling == "last" else 0


class EmbedTask(ReadingTask):
    """Embeddings of the rows' prompts."""

    def __init__(self, job: Job, hidden_size: int, *, shares_prefixes: bool) -> None:
        self.sampling = job.sampling
        self._prefix = job.output_prefix
        self._columns = columns(hidden_size)
        self._reads = PooledHidden(job.pooling)
        self._normalises = job.embedding_norm == "l2"
        self._shares_prefixes = shares_prefixes

    def requests(self, row: PlannedRow, output_ids: tuple[int, ...] = ()) -> tuple[Request, ...]:
        """What to run for a row."""
        return (Request(row.row_idx, row.token_ids, self.sampling, row.keep_len, reads=self._reads),)

    def fold(self, finished: Sequence[tuple[PlannedRow, tuple[Completion, ...]]]) -> pa.Table:
        """The result rows of finished rows and their duplicates; `columns`."""
        rows = [result for row, (one,) in finished for result in self._results(row, one)]
        return prefixed(pa.Table.from_pylist(rows, schema=self._columns), self._prefix)

    def _results(self, row: PlannedRow, completion: Completion) -> list[dict[str, object]]:
        own = {} if completion.readings is None else {"embedding": self._embedding(completion).tolist()}
        cached_tokens = cached_len(row.shared_len, self._reads.pooling) if self._shares_prefixes else 0
        return list(result_rows(row, (completion,), own, cached_tokens, len(row.token_ids)))

    def _embedding(self, completion: Completion) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        state = completion.readings
        assert state is not None, completion
        return state / max(float(np.linalg.norm(state)), 1e-12) if self._normalises else state
