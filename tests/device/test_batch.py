"""What `pack` makes of a step."""

import torch

from batchrun.engine.batch import pack
from batchrun.engine.step import Item, ScheduledBatch
from tests.device.steps import make_sequence

CPU = torch.device("cpu")


def test_items_become_one_packed_row() -> None:
    first = make_sequence(0, [10, 11, 12, 13, 14, 15, 16], [5, 2, 9])
    second = make_sequence(1, [20, 21, 22], [7])
    batch = ScheduledBatch((Item(first, 3, 4, samples=True), Item(second, 0, 2, samples=False)))
    packed = pack(batch, 4, CPU)
    assert packed.input_ids.tolist() == [[13, 14, 15, 16, 20, 21]]
    assert packed.positions.tolist() == [[3, 4, 5, 6, 0, 1]]
    assert packed.slots.tolist() == [5 * 4 + 3, 2 * 4, 2 * 4 + 1, 2 * 4 + 2, 7 * 4, 7 * 4 + 1]
    assert packed.sampled.tolist() == [3]
    assert (packed.work.q_lens, packed.work.kv_lens, packed.work.block_size) == ((4, 2), (7, 2), 4)
    assert packed.work.block_table.tolist() == [[5, 2], [7, 0]]
    assert packed.copy_sources.tolist() == []


def test_copies_in_a_chain_all_read_the_first_source() -> None:
    """A row that shares what another row of the same step gets by a copy itself once read stale slots."""
    item = Item(make_sequence(0, [1], [0]), 0, 1, samples=True)
    packed = pack(ScheduledBatch((item,), slot_copies=((3, 8), (8, 12), (4, 3), (3, 16))), 4, CPU)
    assert dict(zip(packed.copy_targets.tolist(), packed.copy_sources.tolist(), strict=True)) == {
        8: 3,
        12: 3,
        3: 4,
        16: 4,
    }
