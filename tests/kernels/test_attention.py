"""Every attention equals the reference in float64, through tables of shuffled blocks in a pool full of NaN."""

import pytest
import torch

from batchrun_kernels import Mask, UnsupportedError, Work, native, select
from batchrun_kernels.cpu import GatherAttention
from batchrun_kernels.reference import ReferenceAttention
from tests.kernels.steps import BLOCK, ITEMS, MASKS, Step, attend, make_step


@pytest.mark.parametrize("name", MASKS)
def test_gathered_attention_equals_the_reference(name: str) -> None:
    step = make_step()
    expected = attend(ReferenceAttention(), step, MASKS[name])
    # float32 sums of up to 140 terms of size one.
    torch.testing.assert_close(attend(GatherAttention(), step, MASKS[name]), expected, rtol=0, atol=2e-6)
    assert not expected.isnan().any()


def test_values_may_be_narrower_than_keys() -> None:
    step = make_step(value_dim=3)
    expected = attend(ReferenceAttention(), step, MASKS["all"])
    torch.testing.assert_close(attend(GatherAttention(), step, MASKS["all"]), expected, rtol=0, atol=2e-6)


def test_one_plan_serves_layers_of_different_windows() -> None:
    step = make_step()
    attention, reference = GatherAttention(), ReferenceAttention()
    plan = attention.plan(step.work)
    for window in (None, 2, 64, 1000):
        mask = Mask(0.35, window=window)
        got = attention.attend(step.q, step.keys, step.values, plan, mask)
        torch.testing.assert_close(got, attend(reference, step, mask), rtol=0, atol=2e-6)


def test_strided_queries_are_accepted() -> None:
    step = make_step()
    strided = step.q.transpose(0, 1).contiguous().transpose(0, 1)
    attention = GatherAttention()
    got = attention.attend(strided, step.keys, step.values, attention.plan(step.work), MASKS["plain"])
    assert torch.equal(got, attend(attention, step, MASKS["plain"]))


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    step = make_step()
    together = attend(GatherAttention(), step, MASKS["plain"])
    row = 0
    for item, (q_len, kv_len) in enumerate(ITEMS):
        alone = Work((q_len,), (kv_len,), step.work.block_table[item : item + 1], BLOCK)
        lone = Step(step.q[row : row + q_len], step.keys, step.values, alone)
        assert torch.equal(attend(GatherAttention(), lone, MASKS["plain"]), together[row : row + q_len])
        row += q_len


def test_half_precision_pool_is_within_its_rounding() -> None:
    step = make_step()
    half = Step(step.q.bfloat16(), step.keys.bfloat16(), step.values.bfloat16(), step.work)
    got = attend(GatherAttention(), half, MASKS["all"])
    assert got.dtype == torch.bfloat16
    # Two units in the last place of a bfloat16 between 2 and 4; values reach 3.9, and one unit is what was measured.
    torch.testing.assert_close(
        got.double(), attend(ReferenceAttention(), half, MASKS["all"]).double(), rtol=0, atol=2 * 2**-6
    )


def test_attention_is_chosen_by_device_and_an_unknown_device_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "find", lambda: None)
    assert select("cpu", frozenset({"sinks", "window"})).name == "torch"
    assert select("cuda:1", frozenset()).name == "torch"
    with pytest.raises(UnsupportedError, match="no attention kernel for device tpu"):
        select("tpu", frozenset())
