"""The lane of the long prompts: it keeps them from stalling the short ones."""

import sys
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lane:
    """Prompts of which more than `above` tokens are to be computed are long. One at a time is computed, and others
    have at least half of what the decodes leave of a step, as far as they can use it."""

    above: int

    def is_long(self, num_tokens: int) -> bool:
        """Whether a prompt with so many tokens to compute belongs into the lane."""
        return num_tokens > self.above

    def share(self, num_tokens: int, budget: int) -> int:
        """Tokens of the `budget` left that such a prompt may take before others have had theirs."""
        return -(-budget // 2) if self.is_long(num_tokens) else budget


NO_LANE = Lane(above=sys.maxsize)
