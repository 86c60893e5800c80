"""The rows that all ways score: prompts, and the choices behind each, as texts and as tokens.

Knows nothing of ways, processes or time.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchrun.errors import DataError
from batchrun.plan.continuations import join
from batchrun.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ScoreWorkload:
    """Row i has the choices `choices[i]` behind `prompts[i]`; as tokens `choice_ids[i]` behind `prompt_ids[i]`."""

    prompts: tuple[str, ...]
    choices: tuple[tuple[str, ...], ...]
    prompt_ids: tuple[tuple[int, ...], ...]
    choice_ids: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def num_choices(self) -> int:
        return sum(map(len, self.choices))

    @property
    def num_tokens(self) -> int:
        """Of all choices, each with its prompt."""
        return sum(map(len, self.texts))

    @property
    def texts(self) -> list[tuple[int, ...]]:
        """What has to be computed for each choice: its prompt and its tokens but the last."""
        rows = zip(self.prompt_ids, self.choice_ids, strict=True)
        return [(*prompt, *choice[:-1]) for prompt, choices in rows for choice in choices]

    @property
    def num_read(self) -> int:
        """Different places behind which a token's probability is wanted."""
        rows = zip(self.prompt_ids, self.choice_ids, strict=True)
        return len({(*prompt, *choice[:at]) for prompt, own in rows for choice in own for at in range(len(choice))})

    def save(self, file: Path) -> None:
        """As a job's input: the columns `prompt` and `choices`."""
        choices = pa.array([list(own) for own in self.choices], pa.list_(pa.string()))
        pq.write_table(pa.table({"prompt": list(self.prompts), "choices": choices}), file)

    def given(self) -> dict[str, Any]:
        return {
            "prompts": list(self.prompts),
            "choices": [list(own) for own in self.choices],
            "prompt_ids": [list(ids) for ids in self.prompt_ids],
            "choice_ids": [[list(ids) for ids in own] for own in self.choice_ids],
        }


def read(source: Path, prompt_col: str, choices_col: str, tokenizer: Tokenizer) -> ScoreWorkload:
    """The rows of a Parquet file; prompts are taken as they are. Raises DataError: they are not what is needed."""
    table = pq.read_table(source)
    for name in (prompt_col, choices_col):
        if name not in table.column_names:
            raise DataError(f"{source} has no column {name!r}; it has: {', '.join(table.column_names)}")
    prompts = table.column(prompt_col).to_pylist()
    choices = [tuple(own) if isinstance(own, list) else () for own in table.column(choices_col).to_pylist()]
    for row, (prompt, own) in enumerate(zip(prompts, choices, strict=True)):
        if not isinstance(prompt, str) or not prompt.strip() or len({*own}) < 2 or not all(map(_is_text, own)):
            raise DataError(f"{source}, row {row}: give a prompt and two different choices or more")
    joined = list(join(tokenizer, prompts, choices, add_special_tokens=True))
    return ScoreWorkload(
        tuple(prompts),
        tuple(choices),
        tuple(tuple(one.prompt.tolist()) for one in joined),
        tuple(tuple(tuple(ids.tolist()) for ids in one.endings) for one in joined),
    )


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""
