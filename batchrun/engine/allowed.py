"""Which tokens the grammars of a step's rows allow. Rows without one cost nothing."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchrun.engine.grammar import Asked, TokenBits
from batchrun.engine.step import Item, ScheduledBatch

_WORD = 32


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """Of those of `ScheduledBatch.sampled` that are at `places`; all others may be followed by any token."""

    places: NDArray[np.int64]  # [num_rows], ascending
    bits: TokenBits  # [num_rows, num_words]


def allowed_tokens(batch: ScheduledBatch, eos_token_ids: tuple[int, ...]) -> AllowedTokens | None:
    """None where no row that samples has a grammar. What is pending of such a row must be known."""
    constrained = [item for item in batch.items if item.sequence.matcher is not None and item.samples]
    if not constrained:
        return None
    grammar = constrained[0].sequence.request.grammar
    assert grammar is not None, "a matcher of no grammar"
    bits = grammar.allowed([_asked(item) for item in constrained])
    choices = [choice for item in constrained for choice in item.choices]
    for row, choice in zip(bits, choices, strict=True):
        if choice.output_len < choice.sequence.request.sampling.min_tokens:
            _bar_ends(row, choice, eos_token_ids)
    is_constrained = [item.sequence.matcher is not None for item in batch.sampled]
    return AllowedTokens(np.flatnonzero(is_constrained), bits)


def token_lists(bits: TokenBits) -> list[NDArray[np.int64]]:
    """The tokens of each row, ascending."""
    return [np.flatnonzero(row) for row in np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")]


def _asked(item: Item) -> Asked:
    assert item.sequence.matcher is not None, "a row without a grammar"
    return Asked(item.sequence.matcher, tuple(item.context[item.end - item.num_draft :].tolist()))


def _bar_ends(
    row: NDArray[np.int32],  # [num_words], changed in place
    item: Item,
    eos_token_ids: tuple[int, ...],
) -> None:
    """Takes out the tokens that end a text, unless nothing else may come."""
    others = row.copy().view(np.uint32)
    for token in (*eos_token_ids, *item.sequence.request.sampling.stop_token_ids):
        others[token // _WORD] &= ~np.uint32(1 << token % _WORD)
    if others.any():
        row[:] = others.view(np.int32)
