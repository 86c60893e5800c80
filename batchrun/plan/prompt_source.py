"""Where a row's prompt comes from: a column of texts, messages or token ids, or a template over the row.

A prompt is a text, a conversation or token ids; a row without one has a `RowError`.
"""

import json
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

from batchrun.errors import DataError, RowError
from batchrun.plan.batch_requests import BatchRequests, is_batch_schema
from batchrun.plan.cells import column_values, is_text, row_numbers
from batchrun.plan.conversation import checked
from batchrun.plan.source import require_column
from batchrun.plan.template import TemplatePrompt
from batchrun.plan.token_columns import TokensColumn, is_token_ids

if TYPE_CHECKING:
    from batchrun.engine.request import TokenIds
    from batchrun.job import Job
    from batchrun.tokenizer import Conversation

_DEFAULT_COLUMNS = ("prompt", "messages", "text")


class PromptSource(Protocol):
    """`columns` are those that `read` needs in its batches; `label` says what it is, for people."""

    columns: tuple[str, ...]
    label: str

    def read(
        self, batch: pa.RecordBatch
    ) -> "list[str | RowError] | list[Conversation | RowError] | list[TokenIds | RowError]":
        """The prompt of each row, never empty, or the reason why it has none."""
        ...


def has_prompt(job: "Job", schema: pa.Schema) -> bool:
    """Whether the job names a prompt or the input has a column that is taken for one."""
    is_named = any(given is not None for given in (job.template, job.messages_col, job.prompt_col))
    return is_named or any(name in schema.names and name != job.target_col for name in _DEFAULT_COLUMNS)


def prompt_source(
    job: "Job", schema: pa.Schema, vocab_size: int
) -> "TextColumn | TokensColumn | MessagesColumn | BatchRequests | TemplatePrompt":
    """The source that the job names; when it names none, batch requests or a column called prompt, messages or text.

    Where whole texts are scored, which have no prompt, it is these texts.

    Raises:
        DataError: a column that is missing or of the wrong type, or a template that does not fit the columns.
    """
    if job.task != "generate" and is_batch_schema(schema):
        raise DataError(f"OpenAI batch requests are for --task generate, not {job.task}; make columns of them")
    if job.task == "score" and job.target_col is not None and not has_prompt(job, schema):
        return _column(job.target_col, schema, vocab_size, "--target-col")
    if job.template is not None:
        options = {"choice": job.choice, "json_schema": job.json_schema}
        return TemplatePrompt(job.template, schema, prompt_col=job.prompt_col, options=options)
    if job.messages_col is not None:
        return MessagesColumn(job.messages_col, schema)
    if job.prompt_col is not None:
        return _column(job.prompt_col, schema, vocab_size)
    if is_batch_schema(schema):
        return BatchRequests()
    for name in _DEFAULT_COLUMNS:
        if name in schema.names and name != job.target_col:
            return MessagesColumn(name, schema) if name == "messages" else _column(name, schema, vocab_size)
    names = ", ".join(schema.names[:20])
    raise DataError(f"no column is called prompt, messages or text; say --prompt-col, --messages-col or -t ({names})")


def _column(name: str, schema: pa.Schema, vocab_size: int, option: str = "--prompt-col") -> "TextColumn | TokensColumn":
    kind = require_column(schema, name, option).type
    return TokensColumn(name, vocab_size) if is_token_ids(kind) else TextColumn(name, schema, option)


class TextColumn:
    """The column's text, as it is."""

    def __init__(self, name: str, schema: pa.Schema, option: str = "--prompt-col") -> None:
        """Raises DataError: no such column, or it holds no text."""
        field = require_column(schema, name, option)
        if not is_text(field.type):
            remedy = f"-t '{{{{ {name} }}}}' makes text of it"
            raise DataError(f"{option}: column {name!r} is {field.type}, not text; {remedy}")
        self._name = name
        self.columns = (name,)
        self.label = f"column {name!r}"

    def read(self, batch: pa.RecordBatch) -> list[str | RowError]:
        """The text of each row, or the reason why it has none."""
        values = column_values(batch, self._name)
        rows = row_numbers(batch).tolist()
        return [value or self._empty(row, value) for row, value in zip(rows, values, strict=True)]

    def _empty(self, row: int, value: object) -> RowError:
        what = "null" if value is None else "empty"
        return RowError("empty_prompt", f"row {row}: column {self._name!r} is {what}; fill it or filter the row out")


class MessagesColumn:
    """The column's conversation: a list of role and content, or the same as JSON text."""

    def __init__(self, name: str, schema: pa.Schema) -> None:
        """Raises DataError: no such column, or it holds no messages."""
        field = require_column(schema, name, "--messages-col")
        if not is_text(field.type) and not _is_messages(field.type):
            raise DataError(
                f"--messages-col: column {name!r} is {field.type}; make it a list of role and content, or JSON"
            )
        self._name = name
        self.columns = (name,)
        self.label = f"messages in column {name!r}"

    def read(self, batch: pa.RecordBatch) -> "list[Conversation | RowError]":
        """The conversation of each row, or the reason why it has none."""
        values = column_values(batch, self._name)
        rows = row_numbers(batch).tolist()
        return [self._conversation(row, value) for row, value in zip(rows, values, strict=True)]

    def _conversation(self, row: int, value: Any) -> "Conversation | RowError":
        if isinstance(value, RowError):
            return value
        try:
            messages = _parsed(value) if isinstance(value, str) and value else value
            if not messages:
                what = "null" if value is None else "empty"
                message = f"row {row}: column {self._name!r} is {what}; fill it or filter the row out"
                return RowError("empty_prompt", message)
            return checked(messages)
        except ValueError as error:
            return RowError("template_error", f"row {row}: column {self._name!r}: {error}; correct it")


def _is_messages(kind: pa.DataType) -> bool:
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        return False
    names = [field.name for field in kind.value_type] if pa.types.is_struct(kind.value_type) else []
    return "role" in names and "content" in names


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"not JSON ({error})") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
