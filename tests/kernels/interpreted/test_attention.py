"""The Triton attention as an engine uses it: its layout, plans step after step, padded batches and refilled plans."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from batchrun_kernels import KVLayer, KVPool, Mask, Work
from batchrun_kernels.layout import SlotMajor
from batchrun_kernels.reference import ReferenceAttention
from batchrun_kernels.triton.attention import TritonAttention, TritonPlan
from tests.kernels.interpreted.steps import Shape, Step, make_step
from tests.kernels.steps import lay_out

SHAPE = Shape()
PLAIN, WINDOW = Mask(0.35), Mask(0.35, window=9, sinks=torch.linspace(-2.0, 3.0, SHAPE.heads))
# float32 sums of up to 530 terms below 4.
ATOL = 5e-6


def on(step: Step, device: torch.device) -> Step:
    return replace(step, q=step.q.to(device), keys=step.keys.to(device), values=step.values.to(device))


def attend(attention: TritonAttention, step: Step, pool: KVPool, plan: TritonPlan, mask: Mask) -> Tensor:
    sinks = None if mask.sinks is None else mask.sinks.to(step.q.device)
    return attention.attend(step.q, pool.keys, pool.values, plan, replace(mask, sinks=sinks))


def check(got: Tensor, step: Step, mask: Mask) -> None:
    exact = replace(step, q=step.q.double(), keys=step.keys.double(), values=step.values.double())
    expected = ReferenceAttention().attend(exact.q.cpu(), exact.keys.cpu(), exact.values.cpu(), exact.work, mask)
    torch.testing.assert_close(got.cpu().double(), expected, rtol=0, atol=ATOL)


def test_the_engines_contract_is_kept_step_after_step(device: torch.device) -> None:
    """Two decode steps of one planner, with layers of two windows in each, over the layout's own pool."""
    attention = TritonAttention(device)
    for grown in range(2):
        lens = tuple((1, kv_len + grown) for kv_len in (5, 11, 30))
        step = on(make_step(lens, SHAPE), device)
        pool = lay_out(attention, step)
        plan = attention.plan(step.work)
        for mask in (PLAIN, WINDOW):
            check(attend(attention, step, pool, plan, mask), step, mask)
        assert len(plan.lists) == 2


def test_layers_seen_once_are_planned_before_the_next_step(device: torch.device) -> None:
    """In blocks of another size too: a model is checked, when loaded, in smaller ones than it then runs in."""
    attention = TritonAttention(device)
    step = on(make_step(((1, 5), (7, 11)), SHAPE), device)
    pool = lay_out(attention, step)
    first = attention.plan(step.work)
    assert first.lists == {}
    for mask in (PLAIN, WINDOW):
        attend(attention, step, pool, first, mask)
    again = attention.plan(Work((1,), (9,), torch.zeros(1, 2, dtype=torch.int32), 8))
    assert [(rules.block_size, rules.window) for rules in again.lists] == [(8, None), (8, 9)]


def pad(step: Step, num_rows: int) -> Step:
    """NaN behind the work's rows."""
    q = step.q.new_full((num_rows, *step.q.shape[1:]), math.nan)
    q[: len(step.q)] = step.q
    return replace(step, q=q)


# Two pieces that are merged, a chunk in wide tiles, a lone row; and another step of the same buckets.
LENS, OTHER_LENS = ((1, 520), (20, 30), (1, 9)), ((1, 530), (18, 25))


@pytest.mark.parametrize("mask", [PLAIN, WINDOW], ids=["plain", "window"])
def test_a_refilled_plan_is_the_other_plan(device: torch.device, mask: Mask) -> None:
    """The same bits from a padded batch, whose rows behind the work are zero; then back again."""
    attention = TritonAttention(device)
    steps = [on(make_step(lens, SHAPE, seed=seed), device) for seed, lens in enumerate((LENS, OTHER_LENS))]
    pools = [lay_out(attention, step) for step in steps]
    for step, pool in zip(steps, pools, strict=True):
        attend(attention, step, pool, attention.plan(step.work), mask)
    plans = [attention.plan(step.work) for step in steps]
    assert plans[0].shape == plans[1].shape
    memory = [lists.buffer.data_ptr() for lists in plans[0].lists.values()]
    for at in (1, 0):
        refilled, step, pool = plans[0], steps[at], pools[at]
        fresh = attention.plan(step.work)
        refilled.refill(fresh)
        assert [lists.buffer.data_ptr() for lists in refilled.lists.values()] == memory
        # As many rows as the first plan had tokens: more than the second has.
        got = attend(attention, pad(step, 22), pool, refilled, mask)
        num_tokens = sum(step.work.q_lens)
        assert torch.equal(got[:num_tokens], attend(attention, step, pool, fresh, mask))
        assert torch.equal(got[num_tokens:], torch.zeros_like(got[num_tokens:]))
        check(got[:num_tokens], step, mask)


def test_plans_of_other_buckets_are_not_mixed(device: torch.device) -> None:
    attention = TritonAttention(device)
    step = on(make_step(((1, 5),), SHAPE), device)
    pool = lay_out(attention, step)
    attend(attention, step, pool, attention.plan(step.work), PLAIN)
    more = on(make_step(((1, 5),) * 17, SHAPE), device)
    plan, other = attention.plan(step.work), attention.plan(more.work)
    assert plan.shape != other.shape
    with pytest.raises(AssertionError):
        plan.refill(other)


def test_slots_are_copied_as_by_the_plain_layout(device: torch.device) -> None:
    """Within blocks, across them, and a source that is a target too."""
    random = torch.Generator().manual_seed(0)
    layer, slots = KVLayer(3, 10, 6), torch.arange(20, device=device)
    key, value = (torch.randn(20, 3, dim, generator=random).to(device) for dim in (10, 6))
    sources, targets = (torch.tensor(ids, device=device) for ids in ([3, 19, 7, 0], [4, 1, 8, 7]))
    pools = []
    for layout in (TritonAttention(device).layout, SlotMajor()):
        pool = layout.allocate(5, 4, layer, key)
        layout.write(pool, key, value, slots)
        layout.copy_slots(pool, sources, targets)
        pools.append(pool)
    assert torch.equal(pools[0].keys.transpose(1, 2), pools[1].keys)
    assert torch.equal(pools[0].values.transpose(1, 2), pools[1].values)


def test_tokens_that_pad_a_batch_are_written_to_one_slot(device: torch.device) -> None:
    layout = TritonAttention(device).layout
    pool = layout.allocate(2, 4, KVLayer(2, 8, 8), torch.zeros((), device=device))
    for tensor in (pool.keys, pool.values):
        tensor.fill_(math.nan)
    key = torch.arange(4.0, device=device)[:, None, None].expand(4, 2, 8)
    layout.write(pool, key, -key, torch.tensor([1, 2, 7, 7], device=device))
    flat = pool.keys.transpose(1, 2).flatten(0, 1)[:, 0, 0]
    assert flat[1:3].tolist() == [0.0, 1.0]
    assert flat[[0, 3, 4, 5, 6]].isnan().all()


def test_what_has_no_tile_does_not_fit(device: torch.device) -> None:
    attention = TritonAttention(device)
    assert attention.fits(KVLayer(2, 24, 10), torch.bfloat16)
    assert not attention.fits(KVLayer(2, 24, 10), torch.float64)
    assert not attention.fits(KVLayer(2, 24, 10), torch.int8)
