"""A step's lists on a device: the work list's own, in one buffer whose layout depends on buckets only."""

import numpy as np
import pytest
import torch

from batchrun_kernels.triton.lists import DeviceLists, ListShape, to_device
from batchrun_kernels.worklist import Planner, Worklist
from tests.kernels.worklists import random_rules, random_work

CPU = torch.device("cpu")


def random_lists(seed: int) -> Worklist:
    random = np.random.default_rng(seed)
    rules = random_rules(random)
    return Planner(rules).plan(random_work(random, rules))


def contents(lists: DeviceLists) -> dict[str, list[int] | list[list[int]]]:
    """Each list up to its count."""
    wide, narrow, merged, _ = lists.counts.tolist()
    return {
        "wide": lists.wide[:wide].tolist(),
        "narrow": lists.narrow[:narrow].tolist(),
        "tokens": lists.merged_tokens[:merged].tolist(),
        "starts": lists.merged_starts[: merged + 1].tolist(),
    }


def expected(listed: Worklist) -> dict[str, list[int] | list[list[int]]]:
    merges = listed.merges
    return {
        "wide": listed.wide.tolist(),
        "narrow": listed.narrow.tolist(),
        "tokens": merges.tokens.tolist(),
        "starts": merges.starts.tolist(),
    }


@pytest.mark.parametrize("seed", range(20))
def test_the_lists_are_the_work_lists(seed: int) -> None:
    listed = random_lists(seed)
    lists = to_device(listed, CPU)
    assert contents(lists) == expected(listed)
    assert lists.block_ids[: len(listed.block_ids)].tolist() == listed.block_ids.tolist()
    assert lists.positions[: len(listed.positions)].tolist() == listed.positions.tolist()
    assert lists.merged_slots[: listed.num_slots].tolist() == listed.merges.slots.tolist()
    for name in ("counts", "wide", "narrow", "block_ids", "positions", "merged_tokens", "merged_starts"):
        # Where a vector load may begin.
        assert (getattr(lists, name).data_ptr() - lists.buffer.data_ptr()) % 16 == 0, name


def test_refilled_lists_are_the_others_in_the_same_memory() -> None:
    found: dict[ListShape, list[Worklist]] = {}
    for seed in range(200):
        listed = random_lists(seed)
        found.setdefault(ListShape.of(listed), []).append(listed)
    alike = max(found.values(), key=len)
    assert len(alike) > 1
    lists = to_device(alike[0], CPU)
    memory = lists.buffer.data_ptr()
    for listed in alike[1:]:
        lists.refill(to_device(listed, CPU))
        assert contents(lists) == expected(listed)
    assert lists.buffer.data_ptr() == memory
    other = next(one for shape, (one, *_) in found.items() if shape != lists.shape)
    with pytest.raises(AssertionError):
        lists.refill(to_device(other, CPU))


@pytest.mark.parametrize(("num", "rows"), [(0, 16), (17, 32), (4000, 4096), (4097, 8192), (34_816, 36_864)])
def test_few_rows_of_partials_are_for_nothing(num: int, rows: int) -> None:
    """Beyond 4,096 a power of two would waste gigabytes."""
    none = np.zeros((0, 7), np.int32)
    listed = random_lists(0)
    none_of_it = Worklist(none, none, listed.block_ids, listed.positions, listed.merges, num, 0)
    assert ListShape.of(none_of_it).num_slots == rows
