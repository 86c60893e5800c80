"""The task of generating text: a planned row becomes a request, a completion becomes result rows.

Knows what the result's columns mean; nothing of scheduling or files.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from batchrun.engine.request import Completion, Request, TokenIds
from batchrun.errors import RowError
from batchrun.grammars import ConstraintUnsupported, Grammars
from batchrun.job import Job
from batchrun.plan.params import merged
from batchrun.tasks.parsed import parsed, parsed_type
from batchrun.tokenizer import Tokenizer

_QUOTED_CHARS = 40
_ERROR_TYPE = pa.struct([("type", pa.string()), ("message", pa.string())])
_COLUMNS = pa.schema(
    [
        pa.field("row_idx", pa.int64(), nullable=False),
        ("text", pa.string()),
        pa.field("finish_reason", pa.string(), nullable=False),
        ("stop_reason", pa.string()),
        pa.field("prompt_tokens", pa.int32(), nullable=False),
        pa.field("cached_tokens", pa.int32(), nullable=False),
        pa.field("completion_tokens", pa.int32(), nullable=False),
        ("error", _ERROR_TYPE),
    ]
)


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """A row as the plan has it. `duplicates` are rows with the same tokens and parameters: they get its answer.

    `shared_len` is how many tokens it shares with the row before it in plan order, `keep_len` with the next row that
    is still to be run. `params` is JSON with the row's own
    sampling parameters, None for the job's. With an `error` there is nothing to run.
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

    def __init__(
        self, job: Job, tokenizer: Tokenizer, grammars: Grammars, max_model_len: int, *, shares_prefixes: bool
    ) -> None:
        self.sampling = job.sampling
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._max_model_len = max_model_len
        self._columns = _columns(job)
        self._column_names = result_schema(job).names
        self._parsed = self._columns.field("parsed").type if "parsed" in self._columns.names else None
        self._shares_prefixes = shares_prefixes

    def request(self, row: PlannedRow, output_ids: tuple[int, ...] = ()) -> Request:
        """What to run for a row; `output_ids` it has generated before go on being generated."""
        sampling = merged(self.sampling, row.params)
        room = self._max_model_len - len(row.token_ids)
        sampling = replace(sampling, max_tokens=min(sampling.max_tokens, room))
        grammar = None if sampling.constraint is None else self._grammars.compile(sampling.constraint)
        return Request(row.row_idx, row.token_ids, sampling, row.keep_len, output_ids, grammar)

    def refusal(self, row: PlannedRow) -> RowError | None:
        """Why the row's constraint cannot be enforced, though it could when the row was planned."""
        constraint = merged(self.sampling, row.params).constraint
        try:
            _ = constraint and self._grammars.compile(constraint)
        except ConstraintUnsupported as error:
            return RowError("schema_unsupported", f"row {row.row_idx}: {error}")
        return None

    def checked(self, row: PlannedRow, completion: Completion) -> Completion:
        """The completion, with an error when its text is not what the row's constraint asks for."""
        constraint = merged(self.sampling, row.params).constraint
        if constraint is None or completion.error is not None:
            return completion
        text = _until_stop(completion, self._tokenizer.decode(completion.token_ids))
        answer = text if isinstance(completion.stop_reason, str) else completion.token_ids
        if self._grammars.compile(constraint).describes(answer):
            return self._fitting(row, completion, text)
        how, remedy = f"ended by {completion.stop_reason!r}", "leave out what stops it"
        if completion.finish_reason == "length":
            how, remedy = f"cut at {len(completion.token_ids):,} tokens", "raise max_tokens"
        said = f"row {row.row_idx}: {how} before the text was complete by {constraint.name}; {remedy}; its end: "
        return replace(completion, error=RowError("schema_violation", said + repr(text[-_QUOTED_CHARS:])))

    def _fitting(self, row: PlannedRow, completion: Completion, text: str) -> Completion:
        """The completion of a text that follows its constraint, with an error when `parsed` has no room for it."""
        try:
            self._value(row, completion, text)
        except ValueError as error:
            return replace(completion, error=RowError("schema_violation", f"row {row.row_idx}: {error}"))
        return completion

    def _value(self, row: PlannedRow, completion: Completion, text: str) -> object:
        """What the text says under the job's schema; None under another constraint, and of a failed row."""
        constraint = merged(self.sampling, row.params).constraint
        if self._parsed is None or completion.error is not None or constraint != self.sampling.constraint:
            return None
        return parsed(text, self._parsed)

    def fold(self, finished: Sequence[tuple[PlannedRow, Completion]]) -> pa.Table:
        """The result rows of finished rows and their duplicates; `result_schema`."""
        texts = self._tokenizer.decode_batch([completion.token_ids for _, completion in finished])
        rows = [
            _result(row_idx, completion, text, row.shared_len if self._shares_prefixes else 0)
            | ({} if self._parsed is None else {"parsed": self._value(row, completion, _until_stop(completion, text))})
            for (row, completion), text in zip(finished, texts, strict=True)
            for row_idx in (row.row_idx, *row.duplicates)
        ]
        return pa.Table.from_pylist(rows, schema=self._columns).rename_columns(self._column_names)


def result_schema(job: Job) -> pa.Schema:
    """The columns that the task adds to the input's, known before anything runs."""
    return pa.schema([field.with_name(job.output_prefix + field.name) for field in _columns(job)])


def _columns(job: Job) -> pa.Schema:
    if job.json_schema is None:
        return _COLUMNS
    return _COLUMNS.insert(len(_COLUMNS) - 1, pa.field("parsed", parsed_type(job.json_schema)))


def failed(row: PlannedRow, error: RowError) -> Completion:
    """The completion of a row that cannot be run."""
    return Completion(row.row_idx, (), "error", prompt_tokens=len(row.token_ids), error=error)


def _until_stop(completion: Completion, text: str) -> str:
    """The text up to the stop string that ended it."""
    stop = completion.stop_reason
    return text[: text.index(stop)] if isinstance(stop, str) else text


def _result(row_idx: int, completion: Completion, text: str, cached_tokens: int) -> dict[str, object]:
    stop, error = completion.stop_reason, completion.error
    return {
        "row_idx": row_idx,
        "text": None if error else _until_stop(completion, text),
        "finish_reason": completion.finish_reason,
        "stop_reason": None if stop is None else str(stop),
        "prompt_tokens": completion.prompt_tokens,
        "cached_tokens": cached_tokens,
        "completion_tokens": len(completion.token_ids),
        "error": None if error is None else {"type": error.type, "message": error.message},
    }
