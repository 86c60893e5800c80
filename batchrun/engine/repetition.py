"""Notices that a sequence says the same over and over. Knows tokens."""

import numpy as np

from batchrun.engine.request import TokenIds


def repeats_itself(output_ids: TokenIds, min_count: int, max_pattern_size: int) -> bool:
    """Whether the output ends with one pattern of at most `max_pattern_size` tokens, `min_count` times in a row."""
    farthest = min(max_pattern_size, len(output_ids) // min_count)
    if farthest == 0:
        return False
    # Only where the last token stood before can a pattern have ended.
    earlier = output_ids[-1 - farthest : -1][::-1]
    for size in (np.flatnonzero(earlier == output_ids[-1]) + 1).tolist():
        end = output_ids[-size * min_count :]
        if np.array_equal(end[size:], end[:-size]):
            return True
    return False
