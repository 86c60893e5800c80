"""What goes into the engine and what comes out: token ids and limits in, token ids out.

Knows nothing of text, Parquet or tensors; the job side and the engine side share this file and `errors`.
"""

import json
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from batchrun.engine.grammar import CONSTRAINT_NAMES, Constraint, ConstraintName, Grammar
from batchrun.errors import RowError

FinishReason = Literal["stop", "length", "repetition", "error", "abort"]
TokenIds = NDArray[np.int32]  # [num_tokens]
Pooling = Literal["last", "mean"]
# Of the sampling parameters, those with which a search for the likeliest text is still one.
_HEEDED_BY_BEAMS = {"max_tokens", "stop_token_ids", "ignore_eos", "seed", "repetition_max_pattern_size"}
EarlyStoppingName = Literal["false", "true", "never"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one row are chosen. The names and their meaning are vLLM's.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 are off. `seed` and the row's index
    and position key the randomness, so that it depends on neither batch, order nor resume. `logit_bias` are pairs of
    a token's id and what is added to its logit. A row ends once it repeats a pattern of up to
    `repetition_max_pattern_size` tokens `repetition_min_count` times in a row; 0: never. At most one of `json_schema`
    (JSON text), `regex`, `guided_choice` and `grammar` (Lark) is set, and the text must follow it.
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
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str, ...] = ()
    repetition_min_count: int = 0
    repetition_max_pattern_size: int = 64
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
    def unheeded_by_beams(self) -> tuple[str, ...]:
        """Which parameters are set that a search with beams cannot heed."""
        others = (field for field in fields(self) if field.name not in _HEEDED_BY_BEAMS)
        return tuple(field.name for field in others if getattr(self, field.name) != field.default)

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
class BeamSearch:
    """The likeliest text that `num_beams` beams find; names and their meaning are those of transformers' `generate`.

    A round of the search looks at the `num_candidates` likeliest continuations of all beams.
    """

    num_beams: int
    num_candidates: int
    length_penalty: float = 1.0
    early_stopping: EarlyStoppingName = "false"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """To read: the log-probability of token `token_ids[i]` behind the row's token `positions[i]`.

    Several tokens may be read at one position; the row's last position is one of them.
    """

    positions: NDArray[np.int32]  # [num_read], ascending
    token_ids: TokenIds  # [num_read]


@dataclass(frozen=True, slots=True)
class PooledHidden:
    """To read: the hidden state behind the last layer's norm, of the last token or the mean over all."""

    pooling: Pooling


@dataclass(frozen=True, slots=True)
class Request:
    """One row for the engine, or one of several branches of a row.

    `keep_len` is the length of the prefix that this row shares with the row after it in plan order:
    nothing behind it has a future reader. `output_ids` are tokens generated before a resume. Where each row of the
    input has `num_samples`, `row_idx` counts all of them, those of one row together. With `num_logprobs` the completion
    has the log-probability of each token, and as many of the likeliest ones. `bad_words` are those of `sampling` as
    tokens, `grammar` is its compiled constraint. Where there is a `reasoning_end`, stop strings and tokens count behind
    this text only. A request that `reads` generates nothing: it is finished when its tokens are computed. With `beams`
    `num_logprobs` is as many as they have candidates at least, and the completion has none.
    """

    row_idx: int
    token_ids: TokenIds  # [prompt_len]
    sampling: SamplingParams
    keep_len: int = 0
    output_ids: tuple[int, ...] = ()
    num_samples: int = 1
    num_logprobs: int | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    reasoning_end: str | None = None
    grammar: Grammar | None = None
    reads: TokenLogprobs | PooledHidden | None = None
    branch: int = 0
    beams: BeamSearch | None = None

    @property
    def needs_known_tokens(self) -> bool:
        """Whether the next token depends on which the ones before are by more than the model."""
        has_long_words = any(len(word) > 1 for word in self.bad_words)
        is_bound = self.grammar is not None or self.beams is not None
        return is_bound or self.sampling.has_penalties or has_long_words

    @property
    def num_sequences(self) -> int:
        """Sequences that it runs as, at most: its beams."""
        return 1 if self.beams is None else self.beams.num_beams

    @property
    def input_row(self) -> int:
        """The row of the input."""
        return self.row_idx // self.num_samples

    @property
    def seed(self) -> int:
        """Of this sample: as vLLM has it, sample s is what the row's only one would be with s added to the seed."""
        return self.sampling.seed + self.row_idx % self.num_samples

    @property
    def key(self) -> tuple[int, int]:
        """Which request it is."""
        return self.row_idx, self.branch

    def shareable_len(self, num_tokens: int, read_end: int = 0) -> int:
        """Of how many of its first `num_tokens` keys and values may come from elsewhere: the next one has to be
        computed, for what is chosen or read behind it. Positions below `read_end` have been read.
        """
        match self.reads:
            case TokenLogprobs(positions):
                unread = positions[np.searchsorted(positions, read_end) :]
                return int(unread[0]) if len(unread) else num_tokens - 1
            case PooledHidden(pooling="mean"):
                return read_end
        return num_tokens - 1

    @property
    def max_len(self) -> int:
        """Prompt and output together, at most; tokens."""
        return len(self.token_ids) + (0 if self.reads is not None else self.sampling.max_tokens)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely the model found a token that was chosen, before anything was done to its logits.

    `rank` is 1 for the likeliest token. `top_ids` are the likeliest ones, with their log-probabilities `top`.
    """

    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """What the engine has to say of one request; `stop_reason` is the stop string or stop token id that ended it.

    `logprobs` are those of `token_ids`, where the request asks for them. The text before a stop string has `text_len`
    characters. `readings` is what was to be read: of `TokenLogprobs` a log-probability and 1 where no token is
    likelier, else 0 (float64 [num_read, 2]); of `PooledHidden` the pooled state (float64 [hidden_size]).
    """

    row_idx: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    prompt_tokens: int = 0
    error: RowError | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    text_len: int | None = None
    branch: int = 0
    readings: NDArray[np.float64] | None = None

    @property
    def key(self) -> tuple[int, int]:
        """Of which request."""
        return self.row_idx, self.branch
