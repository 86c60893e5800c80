"""The task of generating text: a planned row becomes a request, a completion becomes result rows.

Knows what the result's columns mean; nothing of scheduling or files.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import pyarrow as pa

from batchrun.engine.request import BeamSearch, Completion, Request, SamplingParams, TokenIds, TokenLogprob
from batchrun.errors import RowError
from batchrun.grammars import ConstraintUnsupported, Grammars
from batchrun.job import Job
from batchrun.plan.params import merged
from batchrun.tasks.parsed import parsed, parsed_type
from batchrun.tokenizer import Tokenizer

_QUOTED_CHARS = 40
ERROR_TYPE = pa.struct([("type", pa.string()), ("message", pa.string())])
_TOP_TYPE = pa.list_(pa.struct([("token_id", pa.int32()), ("logprob", pa.float32())]))
_LOGPROBS_TYPE = pa.list_(
    pa.struct([("token_id", pa.int32()), ("logprob", pa.float32()), ("rank", pa.int32()), ("top_logprobs", _TOP_TYPE)])
)
_COLUMNS = pa.schema(
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
_REASONING = pa.field("reasoning", pa.string())
# Before the error: what a token's rank and probability were, and of the whole answer their logarithms' sum.
_LOGPROB_COLUMNS = (pa.field("logprob", pa.float64()), pa.field("logprobs", _LOGPROBS_TYPE))


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

    def __init__(
        self,
        job: Job,
        tokenizer: Tokenizer,
        grammars: Grammars,
        max_model_len: int,
        *,
        shares_prefixes: bool,
        num_eos_tokens: int,
    ) -> None:
        self.sampling = job.sampling
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._max_model_len = max_model_len
        self._num_logprobs = job.logprobs
        self.num_beams = job.num_beams
        self._length_penalty, self._early_stopping = job.length_penalty, job.early_stopping
        self._num_eos_tokens = num_eos_tokens
        self._reasoning_start, self._reasoning_end = job.reasoning_start, job.reasoning_end
        self._bad_words = cache(partial(_bad_words, tokenizer))
        self._prefix = job.output_prefix
        self._columns = columns(job)
        self._parsed = self._columns.field("parsed").type if "parsed" in self._columns.names else None
        self._shares_prefixes = shares_prefixes
        self.num_samples = job.n

    @property
    def can_resume(self) -> bool:
        """Whether a row can go on from saved tokens: not without their log-probabilities, nor with beams."""
        return self._num_logprobs is None and self.num_beams == 1

    def requests(self, row: PlannedRow, output_ids: tuple[int, ...] = ()) -> tuple[Request, ...]:
        """What to run for a row; `output_ids` it has generated before go on being generated."""
        sampling = merged(self.sampling, row.params)
        room = self._max_model_len - len(row.token_ids)
        sampling = replace(sampling, max_tokens=min(sampling.max_tokens, room))
        grammar = None if sampling.constraint is None else self._grammars.compile(sampling.constraint)
        beams = self._beams(sampling)
        request = Request(
            row.row_idx,
            row.token_ids,
            sampling,
            row.keep_len,
            output_ids,
            num_samples=self.num_samples,
            num_logprobs=self._num_logprobs if beams is None else beams.num_candidates,
            bad_words=self._bad_words(sampling.bad_words),
            reasoning_end=self._reasoning_end,
            grammar=grammar,
            beams=beams,
        )
        return (request,)

    def _beams(self, sampling: SamplingParams) -> BeamSearch | None:
        """With so many candidates, as transformers has it, that enough are left when some end in each way there is."""
        if self.num_beams == 1:
            return None
        num_ends = (0 if sampling.ignore_eos else self._num_eos_tokens) + len(sampling.stop_token_ids)
        num_candidates = max(2, 1 + num_ends) * self.num_beams
        return BeamSearch(self.num_beams, num_candidates, self._length_penalty, self._early_stopping)

    def refusal(self, row: PlannedRow) -> RowError | None:
        """Why the row's constraint cannot be enforced, though it could when the row was planned."""
        constraint = merged(self.sampling, row.params).constraint
        try:
            _ = constraint and self._grammars.compile(constraint)
        except ConstraintUnsupported as error:
            return RowError("schema_unsupported", f"row {self._input_row(row)}: {error}")
        return None

    def checked(self, row: PlannedRow, completion: Completion) -> Completion:
        """The completion, with an error when its text is not what the row's constraint asks for."""
        constraint = merged(self.sampling, row.params).constraint
        if constraint is None or completion.error is not None:
            return completion
        text = self._tokenizer.decode(completion.token_ids)[: completion.text_len]
        answer = text if isinstance(completion.stop_reason, str) else completion.token_ids
        if self._grammars.compile(constraint).describes(answer):
            return self._fitting(row, completion, text)
        match completion.finish_reason:
            case "length":
                how, remedy = f"cut at {len(completion.token_ids):,} tokens", "raise max_tokens"
            case "repetition":
                how, remedy = "ended since it repeats itself", "raise repetition_min_count"
            case _:
                how, remedy = f"ended by {completion.stop_reason!r}", "leave out what stops it"
        said = (
            f"row {self._input_row(row)}: {how} before the text was complete by {constraint.name}; {remedy}; its end: "
        )
        return replace(completion, error=RowError("schema_violation", said + repr(text[-_QUOTED_CHARS:])))

    def _fitting(self, row: PlannedRow, completion: Completion, text: str) -> Completion:
        """The completion of a text that follows its constraint, with an error when `parsed` has no room for it."""
        try:
            self._value(row, completion, text)
        except ValueError as error:
            return replace(completion, error=RowError("schema_violation", f"row {self._input_row(row)}: {error}"))
        return completion

    def _value(self, row: PlannedRow, completion: Completion, text: str) -> object:
        """What the text says under the job's schema; None under another constraint, and of a failed row."""
        constraint = merged(self.sampling, row.params).constraint
        if self._parsed is None or completion.error is not None or constraint != self.sampling.constraint:
            return None
        return parsed(text, self._parsed)

    def _input_row(self, row: PlannedRow) -> int:
        return row.row_idx // self.num_samples

    def fold(self, finished: Sequence[tuple[PlannedRow, tuple[Completion, ...]]]) -> pa.Table:
        """The result rows of finished rows and their duplicates; `columns`."""
        texts = self._tokenizer.decode_batch([completion.token_ids for _, (completion,) in finished])
        rows = [
            _result(row_idx, completion, said, row.shared_len if self._shares_prefixes else 0)
            for (row, (completion,)), text in zip(finished, texts, strict=True)
            for said in (self._said(row, text, completion),)
            for row_idx in (row.row_idx, *row.duplicates)
        ]
        return prefixed(pa.Table.from_pylist(rows, schema=self._columns), self._prefix)

    def _said(self, row: PlannedRow, text: str, completion: Completion) -> "_Said":
        """The text up to a stop string, without and with what it reasons before it answers, and what it parses to.

        As vLLM's parsers have it, all is reasoning where it does not end.
        """
        text = text[: completion.text_len]
        if self._reasoning_end is None:
            return _Said(text, parsed=self._value(row, completion, text))
        reasoning, _, answer = text.partition(self._reasoning_end)
        return _Said(answer, reasoning.removeprefix(self._reasoning_start))


@dataclass(frozen=True, slots=True)
class _Said:
    """What a row says."""

    answer: str
    reasoning: str | None = None
    parsed: object = None


def _bad_words(tokenizer: Tokenizer, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """The words' tokens, as vLLM has them: where a text begins, and behind a space if that makes another first token of
    as many."""
    found: list[tuple[int, ...]] = []
    for word in words:
        plain, spaced = (
            tuple(ids.tolist())
            for ids in tokenizer.encode([word.lstrip(), f" {word.lstrip()}"], add_special_tokens=False)
        )
        if not plain:  # its letters are none for this model
            continue
        found += [plain, spaced] if len(plain) == len(spaced) and plain[0] != spaced[0] else [plain]
    return tuple(found)


def columns(job: Job) -> pa.Schema:
    """The result's, known before anything runs."""
    *others, error = _COLUMNS
    reasoning = [_REASONING] if job.reasoning_end is not None else []
    form = [] if job.json_schema is None else [pa.field("parsed", parsed_type(job.json_schema))]
    logprobs = _LOGPROB_COLUMNS if job.logprobs is not None else ()
    return pa.schema([*others, *reasoning, *form, *logprobs, error])


def prefixed(rows: pa.Table, prefix: str) -> pa.Table:
    """The rows with `prefix` before the columns' names."""
    return rows.rename_columns([prefix + name for name in rows.schema.names])


def failed(row: PlannedRow, error: RowError) -> Completion:
    """The completion of a row that cannot be run."""
    return Completion(row.row_idx, (), "error", prompt_tokens=len(row.token_ids), error=error)


def _result(row_idx: int, completion: Completion, said: _Said, cached_tokens: int) -> dict[str, object]:
    stop, error = completion.stop_reason, completion.error
    return {
        "row_idx": row_idx,
        "text": None if error else said.answer,
        "finish_reason": completion.finish_reason,
        "stop_reason": None if stop is None else str(stop),
        "prompt_tokens": completion.prompt_tokens,
        "cached_tokens": cached_tokens,
        "completion_tokens": len(completion.token_ids),
        "reasoning": None if error else said.reasoning,
        "parsed": said.parsed,
        "logprob": None if error else math.fsum(one.logprob for one in completion.logprobs),
        "logprobs": None if error else list(map(_listed, completion.token_ids, completion.logprobs)),
        "error": None if error is None else {"type": error.type, "message": error.message},
    }


def _listed(token: int, one: TokenLogprob) -> dict[str, object]:
    top = [{"token_id": each, "logprob": logprob} for each, logprob in zip(one.top_ids, one.top, strict=True)]
    return {"token_id": token, "logprob": one.logprob, "rank": one.rank, "top_logprobs": top}
