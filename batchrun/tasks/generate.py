"""The task of generating text: a planned row becomes a request, a completion becomes result rows.

Knows what the result's columns mean; nothing of scheduling or files.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from batchrun.engine.request import Completion, Request, TokenIds
from batchrun.errors import RowError
from batchrun.job import Job
from batchrun.plan.params import merged
from batchrun.tokenizer import Tokenizer

ERROR_TYPE = pa.struct([("type", pa.string()), ("message", pa.string())])
COLUMNS = pa.schema(
    [
        pa.field("row_idx", pa.int64(), nullable=False),
        ("text", pa.string()),
        pa.field("finish_reason", pa.string(), nullable=False),
        ("stop_reason", pa.string()),
        pa.field("prompt_tokens", pa.int32(), nullable=False),
        pa.field("cached_tokens", pa.int32(), nullable=False),
        pa.field("completion_tokens", pa.int32(), nullable=False),
        ("error", ERROR_TYPE),
    ]
)


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """A row as the plan has it. `duplicates` are rows with the same tokens and parameters: they get its answer.

    `shared_len` is how many tokens it shares with the row before it in plan order, `keep_len` with the next row that
    is still to be run. `params` is JSON with the row's own
    sampling parameters, None for the job's; or what it asks beyond its prompt (see `plan.asked`). With an `error` there
    is nothing to run.
    """

    row_idx: int
    token_ids: TokenIds  # [prompt_len]
    shared_len: int
    keep_len: int
    params: str | None
    duplicates: tuple[int, ...]
    error: RowError | None

    @property
    def num_answered(self) -> int:
        """Rows of the input that its answer answers."""
        return 1 + len(self.duplicates)


class GenerateTask:
    """Text for each row of a job; `max_model_len` bounds prompt and output together, in tokens."""

    def __init__(self, job: Job, tokenizer: Tokenizer, max_model_len: int, *, shares_prefixes: bool) -> None:
        self.sampling = job.sampling
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._prefix = job.output_prefix
        self._shares_prefixes = shares_prefixes

    def requests(self, row: PlannedRow, output_ids: tuple[int, ...] = ()) -> tuple[Request, ...]:
        """What to run for a row; `output_ids` it has generated before go on being generated."""
        sampling = merged(self.sampling, row.params)
        room = self._max_model_len - len(row.token_ids)
        sampling = replace(sampling, max_tokens=min(sampling.max_tokens, room))
        return (Request(row.row_idx, row.token_ids, sampling, row.keep_len, output_ids),)

    def fold(self, finished: Sequence[tuple[PlannedRow, tuple[Completion, ...]]]) -> pa.Table:
        """The result rows of finished rows and their duplicates; `COLUMNS`."""
        texts = self._tokenizer.decode_batch([completion.token_ids for _, (completion,) in finished])
        rows = [
            _result(row_idx, completion, text, row.shared_len if self._shares_prefixes else 0)
            for (row, (completion,)), text in zip(finished, texts, strict=True)
            for row_idx in (row.row_idx, *row.duplicates)
        ]
        return prefixed(pa.Table.from_pylist(rows, schema=COLUMNS), self._prefix)


def prefixed(rows: pa.Table, prefix: str) -> pa.Table:
    """The rows with `prefix` before the columns' names."""
    return rows.rename_columns([prefix + name for name in rows.schema.names])


def failed(row: PlannedRow, error: RowError) -> Completion:
    """The completion of a row that cannot be run."""
    return Completion(row.row_idx, (), "error", prompt_tokens=len(row.token_ids), error=error)


def _result(row_idx: int, completion: Completion, text: str, cached_tokens: int) -> dict[str, object]:
    stop, error = completion.stop_reason, completion.error
    if isinstance(stop, str):
        text = text[: text.index(stop)]
    return {
        "row_idx": row_idx,
        "text": None if error else text,
        "finish_reason": completion.finish_reason,
        "stop_reason": None if stop is None else str(stop),
        "prompt_tokens": completion.prompt_tokens,
        "cached_tokens": cached_tokens,
        "completion_tokens": len(completion.token_ids),
        "error": None if error is None else {"type": error.type, "message": error.message},
    }
