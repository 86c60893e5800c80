"""Rows to token ids: render, apply the chat template, tokenise in large batches, hold to the model's length.

Knows nothing of files, sorting or engines. Whatever is wrong with one row becomes that row's `RowError`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchrun.engine.grammar import Constraint
from batchrun.errors import DataError, RowError, RowErrorType, UsageError
from batchrun.grammars import ConstraintUnsupported, Grammars
from batchrun.plan.asked import asked_choices, asked_target
from batchrun.plan.batch_requests import CUSTOM_ID, BatchRequests
from batchrun.plan.cells import column_values, row_numbers
from batchrun.plan.continuations import Continuations, Joined, continuations
from batchrun.plan.encoding import Encoding, GivenTokens, Prompts, TextsBehind, WholeTexts
from batchrun.plan.fit import Fit
from batchrun.plan.params import ParamsReader, can_hold_params, check_beams, check_token_ids, overriding
from batchrun.plan.prior import ChoicePrior
from batchrun.plan.prompt_source import MessagesColumn, has_prompt, prompt_source
from batchrun.plan.source import require_column
from batchrun.plan.token_columns import TokensColumn

if TYPE_CHECKING:
    from batchrun.engine.request import SamplingParams, TokenIds
    from batchrun.job import Job
    from batchrun.model_spec import ModelSpec
    from batchrun.tokenizer import Conversation, Tokenizer


@dataclass(frozen=True, slots=True)
class Rendered:
    """A batch of rows after rendering; all lists have one entry a row.

    A failed row has an error and no tokens. `params` is the canonical JSON of the row's own sampling parameters, or
    what it asks beyond its prompt (see `asked`).
    `sample` is the text of the first row that did not fail.
    """

    row_idx: NDArray[np.int64]  # [num_rows]
    token_ids: "list[TokenIds]"
    params: list[str | None]
    errors: list[RowError | None]
    sample: str | None


class PromptRenderer:
    """Turns record batches of `columns` into token ids."""

    def __init__(
        self,
        job: "Job",
        tokenizer: "Tokenizer",
        spec: "ModelSpec",
        schema: pa.Schema,
        always: Mapping[str, Any] | None = None,
    ) -> None:
        """`schema` is the input's; `always` are sampling parameters of every row, whatever its own say.

        Raises:
            DataError: a column is missing or of the wrong type, the template does not fit the columns, or a constraint
                cannot be enforced.
            UsageError: chat options that the model cannot serve, or a length beyond the model's.
        """
        self._tokenizer = tokenizer
        self._task = job.task
        self._source = prompt_source(job, schema, spec.vocab_size)
        self._takes_tokens = isinstance(self._source, TokensColumn)
        # A text without a prompt is scored as it is, each token behind those before it.
        self._is_rolling = job.task == "score" and not has_prompt(job, schema)
        self._continuations: Continuations | None = None
        if not self._is_rolling:
            self._continuations = continuations(job, schema, spec.vocab_size, takes_tokens=self._takes_tokens)
        self._uses_chat = tokenizer.has_chat_template if job.chat == "auto" else job.chat == "on"
        self._uses_chat = self._uses_chat and not self._is_rolling and not self._takes_tokens
        self._check_chat(job, spec.name)
        self._system = job.system
        self._params_col = job.params_col
        if job.task != "generate" and always:
            raise UsageError(f"{', '.join(always)}: --task {job.task} samples nothing that these could change")
        try:
            check_token_ids(job.sampling, spec.vocab_size)
            if job.num_beams > 1:
                check_beams(replace(job.sampling, **overriding(always or {})))
        except ValueError as error:
            raise UsageError(str(error)) from None
        self._grammars, self._reasons = Grammars(tokenizer, spec), job.reasoning_end is not None
        self._check_constraint(replace(job.sampling, **overriding(always or {})))
        self._params = ParamsReader(
            job.sampling, always, self._check_form, spec.vocab_size, has_beams=job.num_beams > 1
        )
        own_params = job.params_col is not None or isinstance(self._source, BatchRequests)
        self._has_params = own_params or bool(always)
        if always and not own_params:
            try:
                self._params.overrides(None)
            except ValueError as error:
                raise UsageError(f"{error}; as it is, every row would fail") from None
        if job.params_col is not None:
            kind = require_column(schema, job.params_col, "--params-col").type
            if not can_hold_params(kind):
                raise DataError(f"--params-col: column {job.params_col!r} is {kind}; make it a struct or JSON text")
        self._fit = Fit.of(job, spec)
        self._encoding = self._make_encoding()
        self._prior = None if job.choice_prior is None else self._make_prior(job.choice_prior, job.choice)

    def _make_prior(self, text: str, choices: tuple[str, ...]) -> ChoicePrior:
        """Raises UsageError: the choices that all rows have cannot stand behind it, or the chat template refuses it."""
        (prompt,) = self._chat([self._conversation(text)]) if self._uses_chat else [text]
        if isinstance(prompt, RowError):
            raise UsageError(f"--choice-prior: {prompt.message}")
        adds = not self._uses_chat
        prior = ChoicePrior(self._tokenizer, prompt, self._fit.max_model_len, adds_special_tokens=adds)
        if choices:
            prior.behind(choices)
        return prior

    def _make_encoding(self) -> Encoding:
        if self._takes_tokens:
            return GivenTokens(self._tokenizer, is_rolling=self._is_rolling)
        if self._is_rolling:
            return WholeTexts(self._tokenizer)
        if self._continuations is not None:
            return TextsBehind(self._tokenizer, self._fit, adds_special_tokens=not self._uses_chat)
        return Prompts(self._tokenizer, self._fit, adds_special_tokens=not self._uses_chat)

    @property
    def columns(self) -> tuple[str, ...]:
        """The input columns that `render` reads."""
        params = () if self._params_col is None else (self._params_col,)
        asked = () if self._continuations is None else self._continuations.columns
        return tuple(dict.fromkeys((*self._source.columns, *params, *asked)))

    @property
    def id_column(self) -> str | None:
        """The column that names a row where the job does not say so."""
        return CUSTOM_ID if isinstance(self._source, BatchRequests) else None

    @property
    def label(self) -> str:
        """What the prompts are made of, for people."""
        if self._is_rolling:
            return f"whole texts of {self._source.label}"
        asked = "" if self._continuations is None else f", {self._continuations.label}"
        return self._source.label + (", chat template" if self._uses_chat else "") + asked

    def render(self, batch: pa.RecordBatch) -> Rendered:
        """Every row of the batch (as `source.scan` yields it), in order.

        Raises:
            DataError: a prompt is too long and the job is to fail then.
        """
        rows = row_numbers(batch)
        params, errors = self._row_params(batch)
        asked = self._asked(batch, errors)
        texts = self._texts(batch, errors)
        token_ids: list[TokenIds] = [np.empty(0, dtype=np.int32)] * len(rows)
        sample: str | None = None
        good = [index for index, error in enumerate(errors) if error is None]
        tokenised = self._encoding.encode([texts[index] for index in good], [asked[index] for index in good])
        for index, joined in zip(good, tokenised, strict=True):
            outcome = self._fitted(int(rows[index]), joined)
            if isinstance(outcome, RowError):
                errors[index] = outcome
                continue
            try:
                params[index] = self._said(joined, asked[index], params[index])
            except UsageError as error:
                errors[index] = RowError("invalid_params", f"row {rows[index]}: {error}")
                continue
            token_ids[index] = outcome
            sample = sample if sample is not None else self._shown(texts[index])
        params = [None if error else text for text, error in zip(params, errors, strict=True)]
        return Rendered(rows, token_ids, params, errors, sample)

    def _asked(self, batch: pa.RecordBatch, errors: list[RowError | None]) -> list[tuple[Any, ...]]:
        """The texts behind each row's prompt, none where none are asked for; adds to `errors`."""
        nothing: list[tuple[Any, ...]] = [()] * len(batch)
        if self._continuations is None:
            return nothing
        for index, texts in enumerate(self._continuations.read(batch)):
            if isinstance(texts, RowError):
                errors[index] = errors[index] or texts
            else:
                nothing[index] = texts
        return nothing

    def _fitted(self, row: int, joined: Joined) -> "TokenIds | RowError":
        """The tokens to plan for a row: its prompt, and the text that is to be scored."""
        if any(not len(ids) for ids in joined.endings):
            what = "text has no tokens" if self._is_rolling else "text behind the prompt has no tokens of its own"
            kind: RowErrorType = "empty_prompt" if self._is_rolling else "empty_target"
            return RowError(kind, f"row {row}: the {what}; give it more, or begin it with a space")
        if self._is_rolling:
            return np.concatenate([joined.prompt, *joined.endings])
        given = max((len(ids) for ids in joined.endings), default=1 if self._task == "embed" else None)
        bos = None if self._takes_tokens else self._tokenizer.bos_token_id
        outcome = self._fit.apply(row, joined.prompt, bos, given)
        if isinstance(outcome, RowError) or self._task != "score":
            return outcome
        return np.concatenate([outcome, *joined.endings])

    def _said(self, joined: Joined, texts: tuple[str, ...], params: str | None) -> str | None:
        """What goes with the tokens into the plan. Raises UsageError: a choice cannot stand behind the prior."""
        match self._task:
            case "score":
                return asked_target(len(joined.endings[0]))
            case "choose":
                prior = None if self._prior is None else self._prior.behind(texts)
                return asked_choices(texts, joined.endings, prior)
        return params

    def _check_constraint(self, sampling: "SamplingParams") -> None:
        """Raises DataError when the constraint of all rows cannot be enforced."""
        if sampling.constraint is None:
            return
        try:
            self._check_form(sampling.constraint)
        except ConstraintUnsupported as error:
            raise DataError(f"--{str(error).replace('_', '-', 1)}; leave it out or say it otherwise") from error

    def _check_form(self, constraint: Constraint) -> None:
        """Raises ConstraintUnsupported: it cannot be enforced."""
        if self._reasons:
            raise ConstraintUnsupported(
                constraint, "the whole output follows it, and --reasoning-end has some before it"
            )
        self._grammars.compile(constraint)

    def _check_chat(self, job: "Job", model: str) -> None:
        if self._takes_tokens and (job.chat == "on" or job.system is not None):
            raise UsageError(f"--chat on and --system need texts, and {self._source.label} are taken as they are")
        if self._uses_chat and not self._tokenizer.has_chat_template:
            raise UsageError(f"{model} has no chat template: give one with --chat-template, or --chat off")
        if self._uses_chat:
            return
        if isinstance(self._source, MessagesColumn | BatchRequests):
            raise UsageError(f"{self._source.label} need a chat template, and {model} has none: --chat-template FILE")
        if job.system is not None:
            raise UsageError("--system needs a chat template; without one, write the text into --template")

    def _row_params(self, batch: pa.RecordBatch) -> tuple[list[str | None], list[RowError | None]]:
        params: list[str | None] = [None] * len(batch)
        errors: list[RowError | None] = [None] * len(batch)
        if not self._has_params:
            return params, errors
        rows = row_numbers(batch).tolist()
        for index, cell in enumerate(self._params_cells(batch)):
            if isinstance(cell, RowError):
                errors[index] = RowError("invalid_params", cell.message)
                continue
            try:
                params[index] = self._params.overrides(cell)
            except ValueError as error:
                where = "" if self._params_col is None else f"column {self._params_col!r}: "
                message = f"row {rows[index]}: {where}{error}; correct it, or null for the job's"
                is_constraint = isinstance(error, ConstraintUnsupported)
                errors[index] = RowError("schema_unsupported" if is_constraint else "invalid_params", message)
        return params, errors

    def _params_cells(self, batch: pa.RecordBatch) -> "Sequence[Any | RowError]":
        """What each row says of its parameters: in the column for them, or in its own request."""
        if self._params_col is not None:
            return column_values(batch, self._params_col)
        return self._source.params(batch) if isinstance(self._source, BatchRequests) else [None] * len(batch)

    def _texts(self, batch: pa.RecordBatch, errors: list[RowError | None]) -> list[Any]:
        """What to tokenise of each row, or its token ids, "" for those that failed; adds to `errors`."""
        prompts = self._source.read(batch)
        for index, prompt in enumerate(prompts):
            if isinstance(prompt, RowError) and errors[index] is None:
                errors[index] = prompt
        good = [index for index, error in enumerate(errors) if error is None]
        texts: list[Any] = [prompts[index] for index in good]
        if self._uses_chat:
            texts = self._chat([self._conversation(prompt) for prompt in texts])
        _refuse_surrogates(texts)
        rows = row_numbers(batch)
        result: list[Any] = [""] * len(batch)
        for index, text in zip(good, texts, strict=True):
            if isinstance(text, RowError):
                errors[index] = RowError(text.type, f"row {rows[index]}: {text.message}")
            else:
                result[index] = text
        return result

    def _conversation(self, prompt: "str | Conversation") -> "Conversation":
        """The messages of a prompt; the job's system message comes first unless the row brings its own."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self._system is None or messages[0]["role"] == "system":
            return messages
        return [{"role": "system", "content": self._system}, *messages]

    def _shown(self, prompt: "str | TokenIds") -> str:
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)

    def _chat(self, conversations: "list[Conversation]") -> list[str | RowError]:
        """All at once; when the template refuses one of them, each by itself."""
        try:
            return list(self._tokenizer.chat(conversations))
        # A chat template is the model's own code: whatever it raises is about the conversation.
        except Exception:
            return [self._chat_one(conversation) for conversation in conversations]

    def _chat_one(self, conversation: "Conversation") -> str | RowError:
        try:
            return self._tokenizer.chat([conversation])[0]
        except Exception as error:
            reason = f"the chat template refuses it: {type(error).__name__}: {error}; correct the messages"
            return RowError("template_error", reason)


def _refuse_surrogates(texts: list[Any]) -> None:
    """Replaces texts that have no UTF-8 form (half a surrogate pair, from JSON) by an error, in place."""
    try:
        "".join(text for text in texts if isinstance(text, str)).encode()
    except UnicodeEncodeError:
        for index, text in enumerate(texts):
            if isinstance(text, str) and any("\ud800" <= char <= "\udfff" for char in text):
                texts[index] = RowError("invalid_utf8", "half a surrogate pair has no UTF-8 form; re-encode the text")
