"""Whose keys and values leave the pool when it is full, and which way: computed again later, or copied to the host.

Both ways cost time in proportion to the tokens moved, so the victim is the sequence with the least to lose, and
the way is the cheaper one by what was measured in this run: the model's seconds a token against the link's
seconds a byte. Until both are measured, thresholds stand in: short sequences are recomputed, long ones swapped.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from batchrun.engine.sequence import Sequence

Preemption = Literal["auto", "recompute", "swap"]
Way = Literal["recompute", "swap"]

_RECOMPUTE_BELOW = 1024  # tokens
_SWAP_ABOVE = 4096  # tokens
_SMOOTHING = 0.1


@dataclass(slots=True)
class Costs:
    """Moving averages over this run: seconds a computed token, seconds a swapped byte; None until measured."""

    bytes_per_token: float
    token_seconds: float | None = None
    byte_seconds: float | None = None

    def observe_compute(self, num_tokens: int, seconds: float) -> None:
        if num_tokens:
            self.token_seconds = _smooth(self.token_seconds, seconds / num_tokens)

    def observe_swap(self, num_bytes: int, seconds: float) -> None:
        if num_bytes:
            self.byte_seconds = _smooth(self.byte_seconds, seconds / num_bytes)

    def cheaper(self, num_tokens: int, host_share: float) -> Way:
        """The cheaper way for `num_tokens`, which would take `host_share` of the host's free places."""
        if self.token_seconds is not None and self.byte_seconds is not None:
            there_and_back = 2 * num_tokens * self.bytes_per_token * self.byte_seconds
            return "swap" if there_and_back < num_tokens * self.token_seconds else "recompute"
        if num_tokens < _RECOMPUTE_BELOW:
            return "recompute"
        return "swap" if num_tokens > _SWAP_ABOVE or host_share <= 0.5 else "recompute"


def choose_way(mode: Preemption, costs: Costs, num_tokens: int, num_blocks: int, free_host_slots: int) -> Way:
    """How a sequence leaves. A host pool without room leaves recomputing, whatever the mode."""
    if num_blocks > free_host_slots:
        return "recompute"
    if mode != "auto":
        return mode
    return costs.cheaper(num_tokens, num_blocks / max(free_host_slots, 1))


def choose_victim(candidates: Iterable[tuple[Sequence, int]]) -> Sequence | None:
    """The sequence with the fewest blocks of its own (at least one), the newest of equals.

    `candidates` are (sequence, blocks that leaving would free).
    """
    useful = [(freed, -sequence.arrival, sequence) for sequence, freed in candidates if freed > 0]
    return min(useful, key=lambda entry: entry[:2])[2] if useful else None


def _smooth(average: float | None, value: float) -> float:
    return value if average is None else average + _SMOOTHING * (value - average)
