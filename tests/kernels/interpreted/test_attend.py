"""Attention by work lists equals the reference in float64, for every switch and dtype, however the work is cut."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from batchrun_kernels import Mask, Work
from batchrun_kernels.pieces import Rules
from batchrun_kernels.reference import ReferenceAttention
from batchrun_kernels.triton.attend import attend_launch, empty_partials
from batchrun_kernels.triton.configs import KINDS, architecture, tiles
from batchrun_kernels.triton.lists import to_device
from batchrun_kernels.triton.merge import merge_launch
from batchrun_kernels.triton.pool import Pool
from batchrun_kernels.worklist import Planner
from tests.kernels.interpreted.steps import Shape, Step, make_step, skip_without
from tests.kernels.worklists import random_work

SHAPE = Shape()
# A lone row, decode rows over two levels of shared blocks, a later chunk, a whole prompt.
LENS = ((1, 1), (1, 63), (1, 50), (1, 41), (7, 38), (19, 19))
SHARED = (0, 9, 9, 4, 0)
RULES = Rules(group=3, block_size=4, wide_rows=32, wide_piece=24, narrow_piece=20, min_shared_rows=6, min_shared_len=8)
SINKS = torch.linspace(-2.0, 3.0, SHAPE.heads)
MASKS = {
    "plain": Mask(0.35),
    "window": Mask(0.35, window=9),
    "softcap": Mask(0.35, softcap=1.5),
    "sinks": Mask(0.35, sinks=SINKS),
    "all": Mask(0.35, window=13, softcap=1.5, sinks=SINKS),
}
# Values reach 4 and outputs 3.9. float32: sums of 60 terms. Halves: one rounding of the weights and one of the
# result, each half a unit in the last place of a number below 4 (2**-9, 2**-6).
ATOL = {torch.float32: 3e-6, torch.float16: 2**-9, torch.bfloat16: 2**-6}


def run(step: Step, pool: Pool, mask: Mask, rules: Rules, device: torch.device) -> Tensor:
    """Through the launches, with rules of the test's; every buffer begins as NaN."""
    moved = Pool(
        *(
            None if one is None else one.to(device)
            for one in (pool.keys, pool.values, pool.key_scales, pool.value_scales)
        )
    )
    mask = replace(mask, sinks=None if mask.sinks is None else mask.sinks.to(device))
    q = step.q.to(device)
    lists = to_device(Planner(replace(rules, window=mask.window)).plan(step.work), device)
    out = torch.full((*q.shape[:2], pool.values.shape[3]), math.nan, dtype=q.dtype, device=device)
    partials = empty_partials(lists, q, pool.values.shape[3])
    partials.values.fill_(math.nan)
    partials.lse.fill_(math.nan)
    cut = tiles(architecture(device), max(q.shape[2], pool.values.shape[3]), pool.keys.dtype)
    for kind in KINDS:
        attend_launch(q, moved, lists, mask, out, partials, kind, cut).run()
    merge_launch(partials, lists, mask.sinks, out).run()
    return out.cpu()


def cast(step: Step, dtype: torch.dtype) -> Step:
    return replace(step, q=step.q.to(dtype), keys=step.keys.to(dtype), values=step.values.to(dtype))


def expected(step: Step, mask: Mask) -> Tensor:
    wide = cast(step, torch.float64)
    return ReferenceAttention().attend(wide.q, wide.keys, wide.values, wide.work, mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_attention_equals_the_reference(device: torch.device, name: str, dtype: torch.dtype) -> None:
    step = cast(make_step(LENS, SHAPE, shared=SHARED), dtype)
    got = run(step, Pool(step.keys, step.values), MASKS[name], RULES, device)
    torch.testing.assert_close(got.double(), expected(step, MASKS[name]), rtol=0, atol=ATOL[dtype])


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("name", ["plain", "all"])
def test_a_quantised_pool_is_read_with_its_scales(device: torch.device, name: str, dtype: torch.dtype) -> None:
    """A scale for each token and head of the keys, one for all of the values; unread scales are NaN as well."""
    skip_without(dtype, device)
    step = make_step(LENS, SHAPE, shared=SHARED)
    most = 127 if dtype == torch.int8 else 448
    key_scales = step.keys.abs().amax(-1) / most
    value_scale = step.values.nan_to_num().abs().max() / most
    keys = (step.keys / key_scales[..., None]).nan_to_num()
    values = (step.values / value_scale).nan_to_num()
    keys, values = ((one.round() if dtype == torch.int8 else one).to(dtype) for one in (keys, values))
    pool = Pool(keys, values, key_scales, value_scale.expand(key_scales.shape))
    exact = replace(step, keys=keys.float() * key_scales[..., None], values=values.float() * value_scale)
    got = run(step, pool, MASKS[name], RULES, device)
    torch.testing.assert_close(got.double(), expected(exact, MASKS[name]), rtol=0, atol=ATOL[torch.float32])


def test_pool_and_queries_may_be_strided_and_values_narrower_than_keys(device: torch.device) -> None:
    step = make_step(LENS, replace(SHAPE, value_dim=10), shared=SHARED)
    apart = replace(step, q=step.q.transpose(0, 1).contiguous().transpose(0, 1))
    pool = Pool(*(one.transpose(1, 2).contiguous().transpose(1, 2) for one in (step.keys, step.values)))
    got = run(apart, pool, MASKS["all"], RULES, device)
    torch.testing.assert_close(got.double(), expected(step, MASKS["all"]), rtol=0, atol=ATOL[torch.float32])


@pytest.mark.parametrize("seed", range(6))
def test_random_trees_splits_and_windows(device: torch.device, seed: int) -> None:
    """Two kv heads of two or five query heads, a head_dim of a power of two."""
    random = np.random.default_rng(seed)
    group = int(random.choice([2, 5]))
    rules = replace(
        RULES, group=group, wide_piece=int(random.integers(8, 40)), narrow_piece=int(random.integers(8, 40))
    )
    work: Work = random_work(random, rules, most_sequences=4, most_blocks=11)
    num_blocks = int(work.block_table.max()) + 1
    draws = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, num_blocks, 4, 2, 16, generator=draws)
    step = Step(torch.randn(sum(work.q_lens), 2 * group, 16, generator=draws), keys, values, work)
    window = None if seed % 2 else int(random.integers(1, 30))
    mask = Mask(0.4, window=window, softcap=2.0 if seed % 3 else None)
    got = run(step, Pool(keys, values), mask, rules, device)
    torch.testing.assert_close(got.double(), expected(step, mask), rtol=0, atol=ATOL[torch.float32])


@pytest.mark.parametrize(("heads", "kv_heads"), [(40, 2), (17, 1)])
def test_a_kv_head_of_more_query_heads_than_a_tile_has_rows(device: torch.device, heads: int, kv_heads: int) -> None:
    """Twenty, in two programs of ten, and seventeen, each by itself."""
    shape = Shape(heads=heads, kv_heads=kv_heads)
    step = make_step(((1, 20), (3, 9)), shape)
    group = tiles(architecture(device), 24, torch.float32).heads_together(heads // kv_heads)
    assert group == (10 if kv_heads == 2 else 1)
    mask = Mask(0.35, sinks=torch.linspace(-2.0, 3.0, heads))
    got = run(step, Pool(step.keys, step.values), mask, Rules(group=group, block_size=4, wide_rows=32), device)
    torch.testing.assert_close(got.double(), expected(step, mask), rtol=0, atol=ATOL[torch.float32])


def test_a_decode_row_is_the_same_bits_alone_and_in_a_batch(device: torch.device) -> None:
    step = make_step(((1, 50), (1, 41), (1, 44)), SHAPE, shared=(9, 9))
    rules = replace(RULES, shares_prefixes=False)
    together = run(step, Pool(step.keys, step.values), MASKS["all"], rules, device)
    for row, kv_len in enumerate(step.work.kv_lens):
        work = Work((1,), (kv_len,), step.work.block_table[row : row + 1], 4)
        alone = replace(step, q=step.q[row : row + 1], work=work)
        assert torch.equal(run(alone, Pool(step.keys, step.values), MASKS["all"], rules, device)[0], together[row])
