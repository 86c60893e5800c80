"""Tiles whose blocks are consecutive come in boxes, with the bits that the same tiles have key by key."""

import math
from dataclasses import replace

import pytest
import torch

from batchrun_kernels import Mask
from batchrun_kernels.pieces import Rules
from batchrun_kernels.triton.attend import attend_launch, empty_partials
from batchrun_kernels.triton.attention import TritonAttention
from batchrun_kernels.triton.boxes import boxes
from batchrun_kernels.triton.configs import architecture, tiles
from batchrun_kernels.triton.lists import to_device
from batchrun_kernels.triton.pool import Pool
from batchrun_kernels.worklist import RUNS_HI, Planner
from tests.kernels.interpreted.equality import quantised
from tests.kernels.interpreted.steps import Shape, Step, make_step, scatter
from tests.kernels.interpreted.test_attend import ATOL, MASKS, RULES, cast, expected, run
from tests.kernels.steps import lay_out

# Neither size is a power of two: what a box has beyond them is zero.
SHAPE = Shape(value_dim=40)
CASES = [(name, torch.float32) for name in MASKS]
CASES += [(name, dtype) for name in ("plain", "all") for dtype in (torch.float16, torch.bfloat16)]


def run_len(device: torch.device, dtype: torch.dtype) -> int:
    """Keys of a tile that the device fetches at once; skips the test where there is none."""
    found = tiles(architecture(device), SHAPE.value_dim, dtype).run_len
    if not found:
        pytest.skip(f"needs a GPU that fetches tiles of {dtype} at once")
    return found


def step_in_runs(tile: int, shape: Shape = SHAPE) -> Step:
    """A decode row and one with a common beginning, which ends within a tile; then a chunk. No last tile is whole."""
    lens = ((1, 2 * tile + 5), (1, 3 * tile + 1), (7, 2 * tile + 7))
    run_blocks = tile // shape.block_size
    return make_step(lens, shape, shared=(run_blocks + 1, 0), run_blocks=run_blocks)


def rules_of(tile: int) -> Rules:
    """Some pieces begin within a tile."""
    return replace(RULES, run_len=tile, narrow_piece=tile + tile // 2, wide_piece=2 * tile + 4)


def num_in_runs(step: Step, mask: Mask, rules: Rules) -> int:
    """Items whose first tile is a run."""
    listed = Planner(replace(rules, window=mask.window)).plan(step.work)
    return sum(int((items[:, RUNS_HI] > 0).sum()) for items in (listed.wide, listed.narrow))


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_runs_give_the_bits_of_scattered_blocks(device: torch.device, name: str, dtype: torch.dtype) -> None:
    """Over a pool of NaN, where a box that reaches too far shows."""
    tile = run_len(device, dtype)
    step, mask, rules = cast(step_in_runs(tile), dtype), MASKS[name], rules_of(tile)
    scattered = scatter(step)
    assert num_in_runs(step, mask, rules) > 1
    assert num_in_runs(scattered, mask, rules) == 0
    got = run(step, Pool(step.keys, step.values), mask, rules, device)
    assert torch.equal(got, run(scattered, Pool(scattered.keys, scattered.values), mask, rules, device))
    torch.testing.assert_close(got.double(), expected(step, mask), rtol=0, atol=ATOL[dtype])


def test_blocks_as_long_as_a_tile_are_runs_by_themselves(device: torch.device) -> None:
    tile = run_len(device, torch.float16)
    step = cast(scatter(step_in_runs(tile, replace(SHAPE, block_size=tile))), torch.float16)
    rules = replace(rules_of(tile), block_size=tile)
    assert num_in_runs(step, MASKS["all"], rules) > 1
    got = run(step, Pool(step.keys, step.values), MASKS["all"], rules, device)
    torch.testing.assert_close(got.double(), expected(step, MASKS["all"]), rtol=0, atol=ATOL[torch.float16])


def test_the_engines_attention_reads_runs_out_of_its_own_layout(device: torch.device) -> None:
    """While a tile becomes whole."""
    tile = run_len(device, torch.float16)
    attention = TritonAttention(device)
    for grown in range(3):
        step = cast(make_step(((1, 2 * tile - 1 + grown), (4, tile + 3)), SHAPE, run_blocks=tile // 4), torch.float16)
        found = []
        for one in (step, scatter(step)):
            one = replace(one, q=one.q.to(device), keys=one.keys.to(device), values=one.values.to(device))
            plan = attention.plan(one.work)
            pool = lay_out(attention, one)
            found.append(attention.attend(one.q, pool.keys, pool.values, plan, Mask(0.35)).cpu())
            (lists,) = plan.lists.values()
            in_runs = lists.narrow[:, RUNS_HI].tolist()
            assert sorted(in_runs)[-2:] == ([tile, 2 * tile if grown else tile] if one.work is step.work else [0, 0])
        assert torch.equal(*found)
        torch.testing.assert_close(found[0].double(), expected(step, Mask(0.35)), rtol=0, atol=ATOL[torch.float16])


def test_what_no_box_describes_is_read_key_by_key(device: torch.device) -> None:
    """Rows that are no multiple of 16 bytes, memory that begins between such multiples, and numbers with scales."""
    tile = run_len(device, torch.float16)
    pool = torch.zeros(5, 4, 2, 24, dtype=torch.float16, device=device)
    assert boxes(Pool(pool, pool), tile) is not None
    narrow = torch.zeros(5, 4, 2, 20, dtype=torch.float16, device=device)
    shifted = torch.zeros(5 * 4 * 2 * 24 + 1, dtype=torch.float16, device=device)[1:].view(5, 4, 2, 24)
    for values in (narrow, shifted):
        assert boxes(Pool(pool, values), tile) is None
    step = cast(step_in_runs(tile, Shape(head_dim=5, value_dim=8)), torch.float16)
    assert boxes(Pool(step.keys, step.values), tile) is None
    got = run(step, Pool(step.keys, step.values), MASKS["all"], rules_of(tile), device)
    torch.testing.assert_close(got.double(), expected(step, MASKS["all"]), rtol=0, atol=ATOL[torch.float16])


def test_a_quantised_pool_in_runs_is_read_key_by_key(device: torch.device) -> None:
    cut = tiles(architecture(device), SHAPE.value_dim, torch.int8)
    tile = cut.wide.tokens
    pool, exact = quantised(step_in_runs(tile), torch.int8)
    rules = replace(rules_of(tile), run_len=cut.run_len)
    assert boxes(pool, tile) is None
    got = run(exact, pool, MASKS["all"], rules, device)
    torch.testing.assert_close(got.double(), expected(exact, MASKS["all"]), rtol=0, atol=ATOL[torch.float32])


def test_any_strides_of_16_bytes_will_do(device: torch.device) -> None:
    tile = run_len(device, torch.float16)
    step, rules = cast(step_in_runs(tile), torch.float16), rules_of(tile)
    apart = Pool(*(one.transpose(1, 2).contiguous().transpose(1, 2) for one in (step.keys, step.values)))
    assert boxes(apart, tile) is not None
    got = run(step, apart, MASKS["all"], rules, device)
    assert torch.equal(got, run(step, Pool(step.keys, step.values), MASKS["all"], rules, device))


def test_lists_of_other_tiles_are_refused(device: torch.device) -> None:
    """Half a tile's run would be read as a whole one's."""
    cut = tiles(architecture(device), SHAPE.value_dim, torch.float16)
    step = cast(step_in_runs(cut.wide.tokens), torch.float16)
    q, pool = step.q.to(device), Pool(step.keys.to(device), step.values.to(device))
    rules = replace(RULES, run_len=cut.wide.tokens // 2)
    lists = to_device(Planner(rules).plan(step.work), device)
    out = q.new_full((*q.shape[:2], SHAPE.value_dim), math.nan)
    with pytest.raises(AssertionError, match="runs of"):
        attend_launch(q, pool, lists, Mask(0.35), out, empty_partials(lists, q, SHAPE.value_dim), "narrow", cut)
