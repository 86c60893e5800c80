"""The rows that all ways answer: prompts as tokens, and how many tokens each is answered with.

Knows nothing of ways, processes or time.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchrun.errors import DataError
from batchrun.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Workload:
    """`prompts` as text and as `prompt_ids`; row i is answered with exactly `lengths[i]` tokens, at least one."""

    prompts: tuple[str, ...]
    prompt_ids: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return len(self.prompts)

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompt_ids))

    @property
    def output_tokens(self) -> int:
        return sum(self.lengths)

    def save(self, file: Path) -> None:
        """As a job's input: the columns `prompt` and `params`."""
        params = [json.dumps({"max_tokens": length}) for length in self.lengths]
        pq.write_table(pa.table({"prompt": list(self.prompts), "params": params}), file)

    def given(self) -> dict[str, Any]:
        return {"prompt_ids": [list(ids) for ids in self.prompt_ids], "lengths": list(self.lengths)}


def read(source: Path, prompt_col: str, length: str | int, tokenizer: Tokenizer) -> Workload:
    """The rows of a Parquet file; `length` names a column, or is the same for all rows.

    Prompts are taken as they are, without a chat template.

    Raises:
        DataError: a column is missing, a prompt is no text or no tokens, or a length is not a number above 0.
    """
    table = pq.read_table(source)
    if not table.num_rows:
        raise DataError(f"{source} has no rows")
    prompts = _texts(table, prompt_col, source)
    lengths = [length] * table.num_rows if isinstance(length, int) else _numbers(table, length, source)
    encoded = [tuple(ids.tolist()) for ids in tokenizer.encode(prompts, add_special_tokens=True)]
    if () in encoded:
        raise DataError(f"{source}, row {encoded.index(())}: the prompt is empty")
    return Workload(tuple(prompts), tuple(encoded), tuple(lengths))


def _texts(table: pa.Table, name: str, source: Path) -> list[str]:
    texts: list[str] = []
    for row, value in enumerate(_column(table, name, source)):
        if not isinstance(value, str):
            raise DataError(f"{source}, row {row}: column {name!r} holds no text")
        texts.append(value)
    return texts


def _numbers(table: pa.Table, name: str, source: Path) -> list[int]:
    numbers: list[int] = []
    for row, value in enumerate(_column(table, name, source)):
        if not isinstance(value, int) or value < 1:
            raise DataError(f"{source}, row {row}: column {name!r} holds {value!r}; give a number of tokens above 0")
        numbers.append(value)
    return numbers


def _column(table: pa.Table, name: str, source: Path) -> list[object]:
    if name not in table.column_names:
        raise DataError(f"{source} has no column {name!r}; it has: {', '.join(table.column_names)}")
    values: list[object] = table.column(name).to_pylist()
    return values
