"""Every attention equals the reference in float64, through tables of shuffled blocks in a pool full of NaN."""

import importlib.util
import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from batchrun_kernels import Attention, KVLayer, Mask, UnsupportedError, Work, native, select
from batchrun_kernels.cpu import GatherAttention
from batchrun_kernels.native_attention import NativeAttention
from batchrun_kernels.reference import ReferenceAttention
from batchrun_kernels.triton.configs import Architecture, tiles
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


ATTENTIONS = [ReferenceAttention(), GatherAttention(), *([NativeAttention()] if native.find() is not None else [])]


@pytest.mark.parametrize("attention", ATTENTIONS, ids=lambda attention: attention.name)
def test_rows_that_pad_a_batch_are_zero_and_not_read(attention: Attention) -> None:
    step = make_step()
    padded = replace(step, q=torch.cat([step.q, torch.full((5, *step.q.shape[1:]), math.nan)]))
    got = attend(attention, padded, MASKS["all"])
    assert torch.equal(got[:-5], attend(attention, step, MASKS["all"]))
    assert torch.equal(got[-5:], torch.zeros_like(got[-5:]))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_triton_attends_on_a_gpu_that_has_tiles_for_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    def name(*layers: KVLayer, dtype: torch.dtype = torch.bfloat16) -> str:
        return select("cuda:1", frozenset({"sinks"}), layers, dtype).name

    assert name() == "torch"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert name(KVLayer(8, 128, 128)) == "triton"
    assert name(KVLayer(8, 96, 64), KVLayer(1, 256, 256)) == "triton"
    assert name(KVLayer(8, 96, 64), KVLayer(1, 512, 512)) == "torch"
    assert name(KVLayer(8, 128, 128), dtype=torch.float64) == "torch"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert name(KVLayer(8, 128, 128)) == "torch"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    assert name(KVLayer(8, 128, 128)) == "torch"


def test_attention_on_a_cpu_needs_no_triton() -> None:
    """Neither importing the package nor choosing and running what there is for a CPU imports it."""
    code = "import sys; from batchrun_kernels import select; select('cpu', frozenset()); print('triton' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"


@pytest.mark.parametrize("architecture", ["sm_80", "gfx942"])
def test_float8_keys_are_refused_by_name_where_a_gpu_has_none(architecture: Architecture) -> None:
    with pytest.raises(UnsupportedError, match=f"{architecture} has no float8_e4m3fn for keys and values"):
        tiles(architecture, 128, torch.float8_e4m3fn)
    assert tiles("sm_90", 128, torch.float8_e4m3fn).wide.rows == 64
    assert tiles(architecture, 128, torch.int8).wide.rows == 64
