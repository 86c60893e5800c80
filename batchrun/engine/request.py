"""What goes into the engine and what comes out: token ids and limits in, token ids out.

Knows nothing of text, Parquet or tensors; the job side and the engine side share this file and `errors`.
"""

import json
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from batchrun.engine.grammar import CONSTRAINT_NAMES, Constraint, ConstraintName, Grammar
from batchrun.errors import RowError

FinishReason = Literal["stop", "length", "error", "abort"]
TokenIds = NDArray[np.int32]  # [num_tokens]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one row are chosen. The names and their meaning are vLLM's.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 are off. `seed` and the row's index
    and position key the randomness, so that it depends on neither batch, order nor resume. At most one of
    `json_schema` (JSON text), `regex`, `guided_choice` and `grammar` (Lark) is set, and the text must follow it.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0
    json_schema: str | None = None
    regex: str | None = None
    guided_choice: tuple[str, ...] = ()
    grammar: str | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        neutral = (1.0, 0.0, 0.0)
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != neutral

    @property
    def constraint_names(self) -> tuple[ConstraintName, ...]:
        """Which constraints are set."""
        return tuple(name for name in CONSTRAINT_NAMES if getattr(self, name))

    @property
    def constraint(self) -> Constraint | None:
        """What the text must be, when it must be anything."""
        for name in self.constraint_names:
            value: str | tuple[str, ...] = getattr(self, name)
            return Constraint(name, value if isinstance(value, str) else json.dumps(value))
        return None


@dataclass(frozen=True, slots=True)
class Request:
    """One row for the engine.

    `keep_len` is the length of the prefix that this row shares with the row after it in plan order:
    nothing behind it has a future reader. `output_ids` are tokens generated before a resume. `grammar`
    is the compiled constraint of `sampling`.
    """

    row_idx: int
    token_ids: TokenIds  # [prompt_len]
    sampling: SamplingParams
    keep_len: int = 0
    output_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None

    @property
    def max_len(self) -> int:
        """Prompt and output together, at most; tokens."""
        return len(self.token_ids) + self.sampling.max_tokens


@dataclass(frozen=True, slots=True)
class Completion:
    """What the engine has to say of one row; `stop_reason` is the stop string or stop token id that ended it."""

    row_idx: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    prompt_tokens: int = 0
    error: RowError | None = None
