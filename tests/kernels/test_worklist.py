"""Work lists cover every (row, visible position) once: by brute force, over random trees, splits and windows."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from batchrun_kernels import worklist
from batchrun_kernels.contract import Work
from batchrun_kernels.pieces import Rules, balanced_piece
from batchrun_kernels.planner_times import plan_times
from batchrun_kernels.worklist import KV_HI, KV_LO, Q_LEN, RUNS_HI, SLOT, Planner, Worklist
from tests.kernels.worklists import check, random_rules, random_work


def equal(one: Worklist, other: Worklist) -> bool:
    def fields(listed: Worklist) -> list[np.ndarray]:
        merges = listed.merges
        lists = [listed.wide, listed.narrow, listed.block_ids, listed.positions]
        return [*lists, merges.tokens, merges.starts, merges.slots]

    return all(np.array_equal(a, b) for a, b in zip(fields(one), fields(other), strict=True))


def one_longer(work: Work, random: np.random.Generator) -> Work:
    """The next decode step: another block where the last is full, often the next; the table may have become wider."""
    kv_lens = tuple(kv_len + 1 for kv_len in work.kv_lens)
    table = work.block_table.clone()
    width = max(-(-kv_len // work.block_size) for kv_len in kv_lens)
    if width > table.shape[1]:
        table = torch.cat([table, torch.full((len(table), width - table.shape[1]), -9, dtype=torch.int32)], dim=1)
    for row, kv_len in enumerate(kv_lens):
        at, within = divmod(kv_len - 1, work.block_size)
        if within == 0:
            goes_on = at > 0 and random.random() < 0.7
            table[row, at] = table[row, at - 1] + 1 if goes_on else 100_000 + int(random.integers(1_000_000))
    return Work((1,) * len(kv_lens), kv_lens, table, work.block_size)


@pytest.mark.parametrize("seed", range(12))
def test_every_visible_position_is_covered_once(seed: int) -> None:
    """100 random trees, rules and windows each."""
    random = np.random.default_rng(seed)
    num_shared = num_split = num_runs = 0
    for _ in range(100):
        rules = random_rules(random)
        work = random_work(random, rules)
        listed = Planner(rules).plan(work)
        check(listed, work, rules)
        num_shared += int((listed.wide[:, Q_LEN] > max(work.q_lens)).sum())
        num_split += listed.num_slots
        num_runs += sum(int((items[:, RUNS_HI] > 0).sum()) for items in (listed.wide, listed.narrow))
    # The rules above do cut: a planner that never shares, never splits or finds no runs would pass the rest.
    assert num_shared > 10
    assert num_split > 100
    assert num_runs > 100


@pytest.mark.parametrize("seed", range(6))
def test_decode_steps_planned_one_after_another_equal_steps_planned_alone(seed: int) -> None:
    random = np.random.default_rng(seed)
    for _ in range(5):
        # The tree is read off the first step; sharing found later, at a new block, may not be taken up.
        rules = replace(random_rules(random), shares_prefixes=False)
        planner = Planner(rules)
        work = random_work(random, rules)
        work = replace(work, q_lens=(1,) * len(work.q_lens))
        for _ in range(20):
            listed = planner.plan(work)
            assert equal(listed, Planner(rules).plan(work))
            work = one_longer(work, random)


@pytest.mark.parametrize("seed", range(4))
def test_decode_steps_over_a_prefix_tree_stay_exact(seed: int) -> None:
    random = np.random.default_rng(100 + seed)
    for _ in range(5):
        rules = random_rules(random)
        planner = Planner(rules)
        work = random_work(random, rules)
        for _ in range(12):
            check(planner.plan(work), work, rules)
            work = one_longer(work, random)


def test_a_step_of_other_blocks_or_sequences_is_planned_anew() -> None:
    """The same lengths plus one in other blocks: a planner that went by lengths alone would read the old blocks."""
    rules = Rules(group=2, block_size=4, min_shared_rows=2, min_shared_len=4)
    planner = Planner(rules)
    table = torch.tensor([[0, 1, 2], [0, 1, 3], [0, 4, 5]], dtype=torch.int32)
    planner.plan(Work((1, 1, 1), (9, 10, 11), table, 4))
    moved = Work((1, 1, 1), (10, 11, 12), torch.tensor([[6, 1, 2], [7, 8, 3], [0, 4, 5]], dtype=torch.int32), 4)
    check(planner.plan(moved), moved, rules)
    fewer = Work((1, 1), (11, 12), moved.block_table[1:], 4)
    check(planner.plan(fewer), fewer, rules)


def test_a_shared_prefix_becomes_one_item_where_it_pays() -> None:
    """Eight sequences of group 4 over 256 shared tokens are just enough; a row or a block less is folded away."""
    table = np.arange(8 * 20, dtype=np.int32).reshape(8, 20)
    table[:, :16] = np.arange(1000, 1016)
    rules = Rules(group=4, block_size=16)

    def shared(num: int, kv_len: int) -> list[list[int]]:
        work = Work((1,) * num, (kv_len,) * num, torch.from_numpy(table[:num]), 16)
        listed = Planner(rules).plan(work)
        check(listed, work, rules)
        return listed.wide[:, [Q_LEN, KV_LO, KV_HI, SLOT]].tolist()

    assert shared(8, 300) == [[8, 0, 256, 0]]
    assert shared(7, 300) == []
    assert shared(8, 256) == []


def test_nested_prefixes_become_nodes_of_nodes() -> None:
    table = np.arange(6 * 8, dtype=np.int32).reshape(6, 8)
    table[:, :2] = [900, 901]
    table[1:4, 2:5] = [910, 911, 912]
    rules = Rules(group=2, block_size=4, narrow_rows=4, min_shared_rows=6, min_shared_len=8)
    work = Work((1,) * 6, (30,) * 6, torch.from_numpy(table), 4)
    listed = Planner(rules).plan(work)
    check(listed, work, rules)
    assert listed.wide[:, [Q_LEN, KV_LO, KV_HI]].tolist() == [[3, 8, 20], [6, 0, 8]]
    assert sorted(listed.narrow[:, [KV_LO, KV_HI]].tolist()) == [[8, 30]] * 3 + [[20, 30]] * 3


def test_without_sharing_a_sequence_is_cut_the_same_in_any_batch() -> None:
    random = np.random.default_rng(5)
    for _ in range(50):
        rules = replace(random_rules(random), shares_prefixes=False)
        work = random_work(random, rules)
        items = Planner(rules).plan(work)
        together = sorted(np.concatenate([items.wide, items.narrow])[:, [Q_LEN, KV_LO, KV_HI]].tolist())
        apart = []
        for row in range(len(work.q_lens)):
            table = work.block_table[row : row + 1]
            alone = Planner(rules).plan(
                Work(work.q_lens[row : row + 1], work.kv_lens[row : row + 1], table, work.block_size)
            )
            apart += np.concatenate([alone.wide, alone.narrow])[:, [Q_LEN, KV_LO, KV_HI]].tolist()
        assert together == sorted(apart)


def test_a_balanced_piece_shares_the_work_out_in_steps_of_64() -> None:
    assert balanced_piece((5000, 3000), kv_heads=8, num_programs=132) == 512
    assert balanced_piece((100,), kv_heads=8, num_programs=132) == 256


def test_plans_that_are_timed_are_compared_first(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["decode to decode", "decode to decode, window 1024", "anew", "anew, window 1024"]
    assert [times.name for times in plan_times(num_sequences=9, num_steps=20)] == names
    right = worklist.cut
    # The borders of the step before.
    monkeypatch.setattr(worklist, "cut", lambda *work: work[-1] or right(*work))
    with pytest.raises(AssertionError, match="differs from one made anew"):
        plan_times(num_sequences=9, num_steps=20)


def test_the_example_of_the_readme_is_what_the_planner_makes() -> None:
    table = torch.tensor([[10, 11, 12, 13], [10, 11, 12, 14], [10, 11, 12, 15]], dtype=torch.int32)
    rules = Rules(group=4, block_size=4, run_len=8, min_shared_rows=16, min_shared_len=8)
    listed = Planner(rules).plan(Work((1, 1, 3), (14, 16, 15), table, 4))
    text = (Path(__file__).parents[2] / "kernels" / "README.md").read_text(encoding="utf-8")
    items = re.findall(
        r"^\| (wide|narrow) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", text, re.MULTILINE
    )
    made = [("wide", *row) for row in listed.wide.tolist()] + [("narrow", *row) for row in listed.narrow.tolist()]
    assert [(kind, *map(int, numbers)) for kind, *numbers in items] == made
    merges = listed.merges
    assert merges.slots.tolist() == [0, 5, 1, 6, 2, 7, 3, 8, 4, 9]
    assert (
        f"`block_ids` is {' '.join(map(str, listed.block_ids))}, `positions` {' '.join(map(str, listed.positions))}"
        in text
    )


def test_runs_end_where_a_tile_breaks_or_the_item_does() -> None:
    """Tiles of two blocks of four: blocks 2 and 3 go on in the next tile's, 9 does not; the last tile is not whole."""
    rules = Rules(group=1, block_size=4, run_len=8, narrow_piece=32, shares_prefixes=False)
    table = torch.tensor([[2, 3, 4, 5, 8, 9, 11, 12, 20], [2, 3, 9, 8, 4, 5, 0, 0, 0]], dtype=torch.int32)

    def runs_hi(kv_lens: tuple[int, int], **changed: int) -> list[list[int]]:
        listed = Planner(replace(rules, **changed)).plan(Work((1, 1), kv_lens, table, 4))
        return sorted(listed.narrow[:, [KV_LO, KV_HI, RUNS_HI]].tolist())

    assert runs_hi((36, 24)) == [[0, 24, 8], [0, 32, 32], [32, 36, 0]]
    assert runs_hi((23, 7)) == [[0, 7, 0], [0, 23, 16]]
    # From within a tile on, whose first keys are hidden.
    assert runs_hi((23, 20), window=10) == [[10, 20, 0], [13, 23, 16]]
    # What blocks do not divide is no run of theirs, and one block always is.
    assert runs_hi((36, 24), run_len=6) == [[0, 24, 0], [0, 32, 0], [32, 36, 0]]
    assert runs_hi((36, 23), run_len=4) == [[0, 23, 20], [0, 32, 32], [32, 36, 36]]
