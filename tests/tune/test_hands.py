"""A worker that goes at a pace asks for rows until there are none, and knows what it has in its pool."""

import numpy as np
import pytest

from batchrun.leases import Leases
from batchrun.tune.hands import PacedHand, work
from batchrun.tune.pace import Pace
from batchrun.tune.slices import Slices

PACE = Pace(
    tokens=(10.0, 1000.0),
    seconds=(5.0, 500.0),
    steady_s=0.25,
    step_s=10_000.0,
    lone_s=2.0,
    batch=4,
    error=0.0,
    num_rows=1000,
    are_lengths_known=True,
)


def slices(num: int, *, longest: int = 5) -> Slices:
    """Of ten rows each with 100 tokens, 30 of them shared, and five of output."""

    def filled(value: int) -> np.ndarray:
        return np.full(num, value, dtype=np.int64)

    shared = np.minimum(np.arange(num) * 30, 30)
    return Slices(filled(10), filled(1000), 700 + shared, shared, filled(30), filled(50), filled(longest))


def test_the_pace_is_measured_and_steady_beyond() -> None:
    assert [PACE.of(tokens) for tokens in (0, 5, 10, 505, 1000, 1100)] == pytest.approx([0, 2.5, 5, 252.5, 500, 525])


@pytest.mark.parametrize("num_workers", [1, 2, 5, 50])
@pytest.mark.parametrize("num", [1, 2, 40])
def test_all_slices_are_done_however_short_they_are(num: int, num_workers: int) -> None:
    """Also where a step lasts longer than a slice."""
    rows = slices(num)
    hands = [PacedHand(rows, PACE, shares_prefixes=False) for _ in range(num_workers)]
    shift = work(hands, Leases(rows.shared_len.astype(np.int32), rows.prompt_work + rows.output_tokens, num_workers))
    assert shift.computed_tokens == num * (1000 + 50 - 10)
    assert shift.cached_tokens == 0
    assert len([seconds for seconds in shift.seconds if seconds]) <= min(num, num_workers)


def test_a_beginning_that_somebody_else_has_is_computed_again() -> None:
    hand = PacedHand(slices(9), PACE, shares_prefixes=True)
    hand.give(np.array([3]), 64)
    assert (hand.cached_tokens, hand.computed_tokens) == (1000 - 730, 730 + 40)
    hand.give(np.array([4, 5]), 64)
    assert hand.computed_tokens == 770 + 2 * (700 + 40)
    hand.give(np.array([8]), 64)
    assert hand.computed_tokens == 770 + 3 * (700 + 40)


def test_no_row_is_quicker_than_alone() -> None:
    hand = PacedHand(slices(1, longest=10_000), PACE, shares_prefixes=True)
    hand.give(np.array([0]), 64)
    hand.advance(is_last=True)
    assert hand.now_s == 20_000
    assert not hand.has_work
