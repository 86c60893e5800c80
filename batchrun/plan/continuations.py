"""Given texts behind a prompt: where they come from, and how prompt and text are tokenised at their border.

As EleutherAI's harness does it: spaces at the prompt's end belong to the text behind it, which is tokenised together
with the prompt and cut where the prompt's own tokens end. Knows nothing of engines.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa

from batchrun.errors import DataError, RowError, UsageError
from batchrun.plan.cells import column_values, is_bytes, is_text, row_numbers
from batchrun.plan.source import require_column
from batchrun.plan.token_columns import TargetTokens, is_token_ids

if TYPE_CHECKING:
    from batchrun.engine.request import TokenIds
    from batchrun.job import Job
    from batchrun.tokenizer import Tokenizer

_TOKENISED_CHARS = 8 << 20


class Continuations(Protocol):
    """`columns` are those that `read` needs in its batches; `label` says what they are, for people."""

    columns: tuple[str, ...]
    label: str

    def read(self, batch: pa.RecordBatch) -> "list[tuple[str, ...] | RowError] | list[tuple[TokenIds, ...] | RowError]":
        """The texts of each row, or their token ids: one at least, none of them empty, or the reason why not."""
        ...


def continuations(job: "Job", schema: pa.Schema, vocab_size: int, *, takes_tokens: bool) -> Continuations | None:
    """Those that the job's task needs, if any; `takes_tokens`: the prompts are token ids.

    Raises DataError: a column that is missing or of the wrong type.
    """
    if job.task == "choose" and takes_tokens:
        raise DataError("--task choose puts texts behind prompts, and the prompts are token ids; give prompts as text")
    if job.task == "score":
        assert job.target_col is not None
        if is_token_ids(require_column(schema, job.target_col, "--target-col").type) != takes_tokens:
            raise DataError("--target-col: give prompts and targets both as text, or both as token ids")
        return TargetTokens(job.target_col, vocab_size) if takes_tokens else TargetColumn(job.target_col, schema)
    if job.task == "choose":
        return FixedChoices(job.choice) if job.choices_col is None else ChoicesColumn(job.choices_col, schema)
    return None


class TargetColumn:
    """One text a row."""

    def __init__(self, name: str, schema: pa.Schema) -> None:
        """Raises DataError: no such column, or it holds no text."""
        kind = require_column(schema, name, "--target-col").type
        if not is_text(kind):
            raise DataError(f"--target-col: column {name!r} is {kind}, not text")
        self._name = name
        self.columns: tuple[str, ...] = (name,)
        self.label = f"target in column {name!r}"

    def read(self, batch: pa.RecordBatch) -> list[tuple[str, ...] | RowError]:
        """The text of each row."""
        cells = zip(row_numbers(batch).tolist(), column_values(batch, self._name), strict=True)
        return [self._target(row, value) for row, value in cells]

    def _target(self, row: int, value: Any) -> tuple[str, ...] | RowError:
        if isinstance(value, RowError):
            return value
        if not value:
            what = "null" if value is None else "empty"
            message = (
                f"row {row}: column {self._name!r} is {what}, so nothing is to be scored; fill it or filter the row"
            )
            return RowError("empty_target", message)
        return (value,)


class FixedChoices:
    """The same texts for every row."""

    def __init__(self, texts: tuple[str, ...]) -> None:
        self._texts = texts
        self.columns: tuple[str, ...] = ()
        self.label = f"{len(texts)} choices"

    def read(self, batch: pa.RecordBatch) -> list[tuple[str, ...] | RowError]:
        """The texts, for each row."""
        return [self._texts] * len(batch)


class ChoicesColumn:
    """A list of texts in each row."""

    def __init__(self, name: str, schema: pa.Schema) -> None:
        """Raises DataError: no such column, or it holds no lists of texts."""
        kind = require_column(schema, name, "--choices-col").type
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
        if not is_list or not is_text(kind.value_type) or is_bytes(kind.value_type):
            raise DataError(f"--choices-col: column {name!r} is {kind}; make it a list of texts")
        self._name = name
        self.columns: tuple[str, ...] = (name,)
        self.label = f"choices in column {name!r}"

    def read(self, batch: pa.RecordBatch) -> list[tuple[str, ...] | RowError]:
        """The texts of each row."""
        cells = zip(row_numbers(batch).tolist(), column_values(batch, self._name), strict=True)
        return [self._choices(row, value) for row, value in cells]

    def _choices(self, row: int, value: Any) -> tuple[str, ...] | RowError:
        if isinstance(value, RowError):
            return value
        texts = tuple(value or ())
        if len(texts) < 2 or not all(texts) or len({*texts}) < len(texts):
            message = f"row {row}: column {self._name!r} should list two choices or more, all different and none empty"
            return RowError("invalid_params", f"{message}; correct it")
        return texts


@dataclass(frozen=True, slots=True)
class Joined:
    """A prompt's tokens, and those of each text behind it."""

    prompt: "TokenIds"
    endings: "list[TokenIds]"


def join(
    tokenizer: "Tokenizer", prompts: Sequence[str], texts: Sequence[tuple[str, ...]], *, add_special_tokens: bool
) -> Iterator[Joined]:
    """Each prompt with its texts, tokenised together. A prompt of nothing but spaces belongs to the texts, which then
    stand behind `prefix_token`."""
    for begin, end in _chunks(prompts, texts):
        some, behind = prompts[begin:end], texts[begin:end]
        heads = [prompt.rstrip() for prompt in some]
        wholes = [prompt + text for prompt, own in zip(some, behind, strict=True) for text in own]
        encoded_heads = tokenizer.encode(heads, add_special_tokens=add_special_tokens)
        encoded = iter(tokenizer.encode(wholes, add_special_tokens=add_special_tokens))
        for head, ids, own in zip(heads, encoded_heads, behind, strict=True):
            endings = [next(encoded)[len(ids) :] for _ in own]
            yield Joined(ids if len(ids) and head else prefix_token(tokenizer), endings)


def prefix_token(tokenizer: "Tokenizer") -> "TokenIds":
    """What stands before a text without a prompt; int32 [1]. Raises UsageError: the model has no such token."""
    bos = tokenizer.bos_token_id
    first = bos if bos is not None else next(iter(tokenizer.eos_token_ids), None)
    if first is None:
        raise UsageError("a text without a prompt is scored behind BOS or EOS, and the model's tokenizer has neither")
    return np.array([first], np.int32)


def _chunks(prompts: Sequence[str], texts: Sequence[tuple[str, ...]]) -> Iterator[tuple[int, int]]:
    """Consecutive slices of rows whose texts have some MiB in all."""
    begin = size = 0
    for at, (prompt, own) in enumerate(zip(prompts, texts, strict=True)):
        size += len(prompt) * (1 + len(own)) + sum(map(len, own))
        if size >= _TOKENISED_CHARS:
            yield begin, at + 1
            begin, size = at + 1, 0
    if begin < len(prompts):
        yield begin, len(prompts)
