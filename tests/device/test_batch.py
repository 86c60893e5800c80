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


def test_slot_copies_become_two_lists() -> None:
    item = Item(make_sequence(0, [1], [0]), 0, 1, samples=True)
    packed = pack(ScheduledBatch((item,), slot_copies=((3, 8), (4, 9))), 4, CPU)
    assert packed.copy_sources.tolist() == [3, 4]
    assert packed.copy_targets.tolist() == [8, 9]
