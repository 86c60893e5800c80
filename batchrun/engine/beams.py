"""Beam search over one row: which continuations go on, and which texts it has found.

The rules are those of transformers' `generate(num_beams=…, do_sample=False)`, its scores float32 as there. Knows
sequences and log-probabilities; nothing of blocks or steps.
"""

from dataclasses import dataclass

import numpy as np

from batchrun.engine.request import BeamSearch, TokenLogprob
from batchrun.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Beam:
    """A sequence that goes on, and the sum of its tokens' log-probabilities."""

    sequence: Sequence
    score: np.float32


@dataclass(frozen=True, slots=True)
class Child:
    """A beam's next token; `score` counts it."""

    parent: Sequence
    token: int
    score: np.float32


@dataclass(frozen=True, slots=True)
class Text:
    """A text that has ended; `score` is divided by its length to the power of the length penalty."""

    token_ids: tuple[int, ...]
    score: np.float32


class Beams:
    """The search of one row, round by round: each beam says what may follow it, then all go on by one token.

    `ends_at` are the tokens that end a text. `beams` are the likeliest first; `found` has the best texts so far, the
    best one first.
    """

    def __init__(self, sequence: Sequence, search: BeamSearch, ends_at: frozenset[int]) -> None:
        self.beams = [Beam(sequence, np.float32(0.0))]
        self.found: list[Text] = []
        self._heard: dict[Sequence, TokenLogprob] = {}
        self._search = search
        self._ends_at = ends_at
        self._max_tokens = sequence.request.sampling.max_tokens

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        return tuple(beam.sequence for beam in self.beams)

    def hear(self, sequence: Sequence, logprob: TokenLogprob) -> None:
        """Takes in what is likely to follow a beam; the last word counts."""
        self._heard[sequence] = logprob

    def advance(self) -> tuple[Child, ...]:
        """Ends a round in which every beam was heard: what goes on, the likeliest first; nothing when the search is
        over. `beams` are to be set to the children's sequences then."""
        length = len(self.sequences[0].output_ids) + 1
        candidates = self._candidates()
        self._heard.clear()
        has_ended = [child.token in self._ends_at or length == self._max_tokens for child in candidates]
        num_beams = self._search.num_beams
        best = zip(candidates[:num_beams], has_ended[:num_beams], strict=True)
        new = [self._text(child, length) for child, is_end in best if is_end]
        self.found = sorted([*self.found, *new], key=lambda text: -text.score)[:num_beams]
        going = [child for child, is_end in zip(candidates, has_ended, strict=True) if not is_end][:num_beams]
        return tuple(going) if going and not self._is_over(going[0].score, length) else ()

    def _candidates(self) -> list[Child]:
        """The likeliest continuations over all beams: so many that enough are left when others of them end here."""
        children = [
            Child(beam.sequence, token, beam.score + np.float32(logprob))
            for beam in self.beams
            for token, logprob in zip(self._heard[beam.sequence].top_ids, self._heard[beam.sequence].top, strict=True)
        ]
        return sorted(children, key=lambda child: -child.score)[: self._search.num_candidates]

    def _text(self, child: Child, length: int) -> Text:
        return Text((*child.parent.output_ids.tolist(), child.token), self._normed(child.score, length))

    def _is_over(self, best: np.float32, length: int) -> bool:
        """Whether no beam, of which the best has this score, is expected to become better than what was found."""
        if len(self.found) < self._search.num_beams:
            return False
        if self._search.early_stopping == "true":
            return True
        is_longest_best = self._search.early_stopping == "never" and self._search.length_penalty > 0
        return not self._normed(best, self._max_tokens if is_longest_best else length) > self.found[-1].score

    def _normed(self, score: np.float32, length: int) -> np.float32:
        return np.float32(score / np.float32(length**self._search.length_penalty))
