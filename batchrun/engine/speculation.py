"""Guessing what a sequence says next, so that a step bound by reading the weights computes several tokens of it.

A guess is what followed the last time the sequence's latest tokens stood in it: in the prompt that it quotes, or in
what it has said itself (prompt lookup decoding, Saxena 2023). The step chooses a token behind each guessed one as
if it had come by itself and keeps those up to the first difference (Leviathan et al., ICML 2023, with drafts that are
certain of themselves), so the text is what it would have been. Knows tokens; no model.
"""

from collections.abc import Callable

import numpy as np

from batchrun.engine.next_step import NextStep
from batchrun.engine.request import TokenIds
from batchrun.engine.sequence import Sequence
from batchrun.engine.statistics import Counters

# Tokens that must have stood together before: more say more of what follows, fewer are found more often.
_GRAMS = (3, 2)
_FIRST_LEN, _MOST_LEN = 4, 16
_MOST_PAUSE = 8  # steps without a guess after guesses that were wrong


class PromptLookup:
    """Where the pairs and triples of one sequence's tokens stood last."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}  # tokens -> the place behind them
        self._num_seen = 0
        self._len = _FIRST_LEN
        self._pause = 0
        self._num_wrong = 0  # guesses in a row of which nothing was right

    def propose(self, tokens: TokenIds, most: int) -> TokenIds:
        """int32 [at most `most`]: what may follow `tokens`; empty when nothing is like it or guesses fail."""
        if self._pause > 0:
            self._pause -= 1
            return tokens[:0]
        self._see(tokens)
        for size in _GRAMS:
            begin = self._ends.get(tuple(tokens[-size:].tolist())) if len(tokens) > size else None
            if begin is not None:
                # What follows may reach the end: then it is taken to go round.
                following = np.arange(min(most, self._len)) % (len(tokens) - begin)
                proposed: TokenIds = tokens[begin + following]
                return proposed
        return tokens[:0]

    def learn(self, num_right: int, num_guessed: int) -> None:
        """How a guess went: the next is longer after a right one, shorter or later after a wrong one."""
        if num_right == num_guessed:
            self._len = min(2 * self._len, _MOST_LEN)
        else:
            self._len = max(num_right + 1, _FIRST_LEN // 2)
        self._num_wrong = 0 if num_right else self._num_wrong + 1
        self._pause = min(self._num_wrong // 2, _MOST_PAUSE)

    def _see(self, tokens: TokenIds) -> None:
        """Takes in all tokens but those at the end, behind which nothing stands."""
        for end in range(max(self._num_seen, 1), len(tokens)):
            for size in _GRAMS:
                if end >= size:
                    self._ends[tuple(tokens[end - size : end].tolist())] = end
        self._num_seen = len(tokens)


class Speculation:
    """Fills a step of fewer than `num_free_tokens` with guesses; 0: never. Each sequence gets a `lookup` of its own."""

    def __init__(
        self, num_free_tokens: int, counters: Counters, lookup: Callable[[], PromptLookup] = PromptLookup
    ) -> None:
        self.lookup = lookup
        self._num_free_tokens = num_free_tokens
        self._counters = counters
        self._lookups: dict[Sequence, PromptLookup] = {}

    def extend(self, step: NextStep) -> None:
        """Adds guesses to a step in which rows only decode; those with the longest way to go come first."""
        num_free = min(self._num_free_tokens - sum(step.counts.values()), step.budget)
        if num_free <= 0:
            return
        alone = (one for one in step.counts if one.request.beams is None)
        decoding = [one for one in alone if one.is_decoding and self._most(one) > 0]
        for sequence in sorted(decoding, key=self._most, reverse=True):
            if sequence not in self._lookups:
                self._lookups[sequence] = self.lookup()
            tokens = self._lookups[sequence].propose(sequence.tokens, min(num_free, self._most(sequence)))
            if len(tokens):
                step.guess(sequence, tokens)
                num_free -= step.num_guessed[sequence]
            if num_free <= 0:
                return

    def _most(self, sequence: Sequence) -> int:
        """Tokens that may follow the next one."""
        return sequence.request.sampling.max_tokens - sequence.output_len - 1

    def learn(self, sequence: Sequence, num_right: int, num_guessed: int) -> None:
        """How many of a step's guesses were right."""
        self._counters.drafted_tokens += num_guessed
        self._counters.accepted_tokens += num_right
        self._counters.computed_tokens += num_right
        if sequence in self._lookups:
            self._lookups[sequence].learn(num_right, num_guessed)

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        self._lookups.pop(sequence, None)
