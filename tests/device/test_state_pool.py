"""States are read, written, committed and forgotten slot by slot; windows reach back into them."""

import numpy as np
import pytest
import torch

from batchrun.engine.batch import ForwardBatch, pack
from batchrun.engine.state_pool import StatePool, Windows, state_bytes
from batchrun.engine.step import Item, ScheduledBatch
from batchrun_kernels import Work
from tests.device.steps import make_sequence

CPU = torch.device("cpu")


def step(*items: tuple[int, int, int]) -> ForwardBatch:
    """One with items of (slot, start, tokens)."""
    made = []
    for slot, start, num in items:
        sequence = make_sequence(slot, range(3, 43), list(range(10)))
        sequence.state_slot = slot
        made.append(Item(sequence, start, num, samples=False))
    return pack(ScheduledBatch(tuple(made)), 4, CPU)


@pytest.mark.parametrize("width", [1, 2, 3, 5])
@pytest.mark.parametrize("q_lens", [(1,), (7,), (1, 4, 1, 2, 9), (2, 1, 1), (1, 1, 1, 1)])
def test_a_window_is_the_last_tokens_of_its_own_row(width: int, q_lens: tuple[int, ...]) -> None:
    """Against rows written out one by one: what is in the state, and then the tokens."""
    work = Work(q_lens, q_lens, torch.zeros((len(q_lens), 1), dtype=torch.int32), 4)
    windows = Windows.of(work, width, CPU)
    own = [[(row, place) for place in range(1 - width, num)] for row, num in enumerate(q_lens)]
    states = [token for row in own for token in row[: width - 1]]
    matrix = states + [token for row in own for token in row[width - 1 :]]
    found = [[matrix[place] for place in column] for column in windows.taps.T.tolist()]
    assert found == [row[at : at + width] for row in own for at in range(len(row) - width + 1)]
    assert [[matrix[place] for place in row] for row in windows.last.tolist()] == [
        row[len(row) - width + 1 :] for row in own
    ]


def test_a_step_counts_once_it_is_committed_and_a_sequence_begins_with_zeros() -> None:
    pool = StatePool(4, {0: torch.empty(0, 2, 3), 7: torch.empty(0, 5, dtype=torch.float64)})
    assert state_bytes({0: torch.empty(0, 2, 3), 7: torch.empty(0, 5, dtype=torch.float64)}) == 2 * 3 * 4 + 5 * 8
    pool.begin(step((2, 0, 3), (1, 0, 5)))
    assert torch.equal(pool.read(0), torch.zeros(2, 2, 3))
    assert torch.equal(pool.read(7), torch.zeros(2, 5, dtype=torch.float64))
    pool.write(0, torch.stack([torch.full((2, 3), 20.0), torch.full((2, 3), 10.0)]))
    assert torch.isnan(pool.states[0]).all()
    pool.begin(step((1, 5, 1), (3, 0, 1), (2, 3, 1)))
    assert pool.read(0)[:, 0, 0].tolist() == [10, 0, 20]
    pool.write(0, torch.ones(3, 2, 3))
    pool.discard()
    pool.begin(step((1, 5, 1), (2, 3, 1)))
    assert pool.read(0)[:, 0, 0].tolist() == [10, 20]
    pool.write(0, torch.full((2, 2, 3), 5.0))
    pool.commit()
    pool.commit()
    pool.begin(step((2, 4, 1), (1, 0, 2)))
    assert pool.read(0)[:, 0, 0].tolist() == [5, 0]


def test_a_sequence_without_a_slot_is_a_mistake() -> None:
    pool = StatePool(1, {0: torch.empty(0, 1)})
    sequence = make_sequence(0, np.arange(3, 7), [0])
    with pytest.raises(AssertionError, match="no slot"):
        pool.begin(pack(ScheduledBatch((Item(sequence, 0, 4, samples=False),)), 4, CPU))
