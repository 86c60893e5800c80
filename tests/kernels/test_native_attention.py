"""Attention in C equals the reference in float64 in every shape, and a row's bits are its own."""

import ctypes
import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from batchrun_kernels import KVLayer, Mask, Work, select
from batchrun_kernels.native_attention import NativeAttention
from batchrun_kernels.reference import ReferenceAttention
from tests.kernels.steps import BLOCK, ITEMS, MASKS, Step, attend, lay_out, make_step

pytestmark = pytest.mark.usefixtures("two_threads")

# Blocks below, at, off and beyond 16 positions; widths that end in half a vector pair; groups of 1, 3, 7 and 50.
SHAPES: tuple[dict[str, int], ...] = (
    {"heads": 9, "kv_heads": 3, "key_dim": 64, "value_dim": 64, "block": 16},
    {"heads": 2, "kv_heads": 2, "key_dim": 5, "value_dim": 8, "block": 1},
    {"heads": 7, "kv_heads": 1, "key_dim": 24, "value_dim": 40, "block": 20},
    {"heads": 50, "kv_heads": 1, "key_dim": 16, "value_dim": 16, "block": 8},
    {"heads": 6, "kv_heads": 2, "key_dim": 128, "value_dim": 128, "block": 111},
)


@pytest.mark.parametrize("name", MASKS)
def test_equals_the_reference(library: ctypes.CDLL, name: str) -> None:
    step = make_step()
    expected = attend(ReferenceAttention(), step, MASKS[name])
    # float32 sums of up to 140 terms of size one.
    torch.testing.assert_close(attend(NativeAttention(), step, MASKS[name]), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_reference_in_other_shapes(library: ctypes.CDLL, shape: dict[str, int]) -> None:
    step = make_step(((1, 1), (1, 131), (70, 70), (3, 64), (2, 129), (61, 200)), seed=1, **shape)
    sinks = torch.linspace(-1.0, 1.0, shape["heads"])
    for mask in (Mask(shape["key_dim"] ** -0.5), Mask(0.2, window=67, softcap=2.0, sinks=sinks)):
        expected = attend(ReferenceAttention(), step, mask)
        torch.testing.assert_close(attend(NativeAttention(), step, mask), expected, rtol=0, atol=4e-6)


def test_random_steps_equal_the_reference(library: ctypes.CDLL) -> None:
    chance = random.Random(0)
    for seed in range(60):
        kv_lens = [chance.randint(1, 150) for _ in range(chance.randint(1, 5))]
        items = tuple((chance.choice((1, chance.randint(1, kv_len))), kv_len) for kv_len in kv_lens)
        kv_heads = chance.randint(1, 3)
        shape: dict[str, Any] = {"kv_heads": kv_heads, "heads": kv_heads * chance.randint(1, 4)}
        shape |= {
            "key_dim": chance.randint(1, 20),
            "value_dim": 8 * chance.randint(1, 3),
            "block": chance.randint(1, 40),
        }
        step = make_step(items, seed=seed, **shape)
        mask = Mask(
            0.4,
            window=chance.choice((None, chance.randint(1, 160))),
            softcap=chance.choice((None, 1.5)),
            sinks=chance.choice((None, torch.linspace(-1.0, 1.0, shape["heads"]))),
        )
        expected = attend(ReferenceAttention(), step, mask)
        torch.testing.assert_close(attend(NativeAttention(), step, mask), expected, rtol=0, atol=4e-6, msg=str(seed))


@pytest.mark.parametrize("name", MASKS)
def test_a_rows_bits_depend_neither_on_the_batch_nor_on_the_chunks(library: ctypes.CDLL, name: str) -> None:
    """Every query of every item alone, as if it were decoded, against all of them in one step."""
    step = make_step()
    attention = NativeAttention()
    together = attend(attention, step, MASKS[name])
    pool = lay_out(attention, step)
    row = 0
    for item, (q_len, kv_len) in enumerate(ITEMS):
        for query in range(q_len):
            alone = Work((1,), (kv_len - q_len + query + 1,), step.work.block_table[item : item + 1], BLOCK)
            got = attention.attend(step.q[row : row + 1], pool.keys, pool.values, attention.plan(alone), MASKS[name])
            assert torch.equal(got[0], together[row]), (item, query)
            row += 1


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("block", [4, 16, 48])
def test_rows_that_share_blocks_get_the_bits_they_get_alone(library: ctypes.CDLL, name: str, block: int) -> None:
    """A tree of two levels, its branches split within tiles, at their ends and within blocks; drafts and a chunk."""
    step = make_step(tuple((q_len, 330 + q_len) for q_len in (1, 1, 3, 1, 1, 2, 1, 60, 1, 1, 1, 1)), block=block)
    # By item: the positions that it shares with the first one, and with the one before it.
    for item, (first, before) in enumerate(
        ((300, 300), (300, 300), (64, 320), (130, 256), (127, 256), (0, 63)), start=1
    ):
        step.work.block_table[item, : first // block] = step.work.block_table[0, : first // block]
        step.work.block_table[item, : before // block] = step.work.block_table[item - 1, : before // block]
    for item in range(8, 12):
        step.work.block_table[item, : 328 // block] = step.work.block_table[7, : 328 // block]
    attention, mask = NativeAttention(), MASKS[name]
    together = attend(attention, step, mask)
    torch.testing.assert_close(together, attend(ReferenceAttention(), step, mask), rtol=0, atol=4e-6)
    pool, row = lay_out(attention, step), 0
    for item, (q_len, kv_len) in enumerate(zip(step.work.q_lens, step.work.kv_lens, strict=True)):
        alone = Work((q_len,), (kv_len,), step.work.block_table[item : item + 1], block)
        got = attention.attend(step.q[row : row + q_len], pool.keys, pool.values, attention.plan(alone), mask)
        assert torch.equal(got, together[row : row + q_len]), item
        row += q_len


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("factor", [3, 10, 30])
def test_scores_that_rise_from_tile_to_tile_equal_the_reference(library: ctypes.CDLL, name: str, factor: float) -> None:
    """By less, by about and by much more than what is taken without another look at what came before."""
    step = make_step(((1, 400), (70, 330), (3, 390)), seed=2)
    loud = replace(step, q=step.q * factor)
    expected = attend(ReferenceAttention(), loud, MASKS[name])
    torch.testing.assert_close(attend(NativeAttention(), loud, MASKS[name]), expected, rtol=0, atol=4e-6 * factor)


def test_large_scores_do_not_overflow_and_nan_stays_visible(library: ctypes.CDLL) -> None:
    step = make_step()
    loud = replace(step, q=step.q * 1000)
    expected = attend(ReferenceAttention(), loud, MASKS["plain"])
    # Scores reach 3000, where a float32 unit is 2.4e-4: weights are right to that, relatively, and values reach 4.
    torch.testing.assert_close(attend(NativeAttention(), loud, MASKS["plain"]), expected, rtol=0, atol=1e-3)
    broken = replace(step, q=step.q.clone())
    broken.q[3, 1] = torch.nan
    got = attend(NativeAttention(), broken, MASKS["plain"])
    assert got[3, 1].isnan().all()
    assert got.isnan().sum() == got.shape[-1]


def test_strided_queries_keys_and_values_are_accepted(library: ctypes.CDLL) -> None:
    step = make_step()

    def strided(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(-3, -2).contiguous().transpose(-3, -2)

    attention = NativeAttention()
    other = Step(strided(step.q), strided(step.keys), strided(step.values), step.work)
    assert torch.equal(attend(attention, other, MASKS["all"]), attend(attention, step, MASKS["all"]))
    beside_keys = torch.cat((step.q, torch.full_like(step.q, math.nan)), dim=1)[:, : step.q.shape[1]]
    other = Step(beside_keys, step.keys, step.values, step.work)
    assert torch.equal(attend(attention, other, MASKS["all"]), attend(attention, step, MASKS["all"]))


def test_copied_slots_are_the_slots_they_were_copied_from(library: ctypes.CDLL) -> None:
    """Across blocks, and chained by one call: every source is read before a target is written."""
    layout = NativeAttention().layout
    pool = layout.allocate(5, 4, KVLayer(2, 3, 8), torch.empty(0))
    key, value = torch.randn(20, 2, 3), torch.randn(20, 2, 8)
    layout.write(pool, key, value, torch.arange(20))
    layout.copy_slots(pool, torch.tensor([1, 6, 19]), torch.tensor([6, 12, 0]))
    moved = torch.arange(20)
    moved[[6, 12, 0]] = torch.tensor([1, 6, 19])
    assert torch.equal(pool.keys.transpose(2, 3).transpose(1, 2).flatten(0, 1), key[moved])
    assert torch.equal(pool.values.transpose(1, 2).flatten(0, 1), value[moved])


def test_is_chosen_where_it_fits(library: ctypes.CDLL) -> None:
    fits, narrow, wide = KVLayer(2, 6, 64), KVLayer(2, 6, 6), KVLayer(2, 520, 64)
    every = frozenset(NativeAttention.features)
    assert select("cpu", every, [fits]).name == "c"
    assert select("cpu", every, [fits, narrow]).name == "torch"
    assert select("cpu", every, [wide]).name == "torch"
    assert select("cpu", every, [fits], torch.bfloat16).name == "torch"
    assert select("cuda", every, [fits]).name == "torch"


def halved(step: Step) -> Step:
    """Keys and values rounded to float16."""
    return replace(step, keys=step.keys.half().float(), values=step.values.half().float())


@pytest.mark.parametrize("name", MASKS)
def test_keys_and_values_of_float16_are_read_exactly(library: ctypes.CDLL, name: str) -> None:
    """What float32 gives for the same rounded numbers, to the bit."""
    step = make_step()
    expected = attend(NativeAttention(), halved(step), MASKS[name])
    assert torch.equal(attend(NativeAttention(), step, MASKS[name], torch.float16), expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float16_equals_the_reference_in_other_shapes(library: ctypes.CDLL, shape: dict[str, int]) -> None:
    step = make_step(((1, 1), (1, 131), (70, 70), (3, 64), (61, 200)), seed=2, **shape)
    mask = Mask(0.2, window=67, softcap=2.0, sinks=torch.linspace(-1.0, 1.0, shape["heads"]))
    expected = attend(ReferenceAttention(), halved(step), mask)
    torch.testing.assert_close(attend(NativeAttention(), step, mask, torch.float16), expected, rtol=0, atol=4e-6)


def test_written_float16_is_rounded_as_torch_rounds_and_never_infinite(library: ctypes.CDLL) -> None:
    """Every float16, the halfway points between neighbours, what is just beside those, and what is too large."""
    exact = torch.arange(1 << 15, dtype=torch.int16).view(torch.float16).float()
    exact = exact[exact.isfinite()]
    halfway = (exact[1:] + exact[:-1]) / 2
    beside = [halfway.nextafter(torch.tensor(end)) for end in (0.0, torch.inf)]
    large = torch.tensor([65519.0, 65520.0, 1e30, torch.inf, torch.nan])
    numbers = torch.cat([exact, halfway, *beside, large])
    numbers = torch.cat([numbers, -numbers])
    values = torch.cat([numbers, numbers.new_zeros(-len(numbers) % 8)]).view(-1, 1, 8)
    layout = NativeAttention().layout
    pool = layout.allocate(len(values), 1, KVLayer(1, 8, 8), torch.empty(0, dtype=torch.float16))
    layout.write(pool, values, values, torch.arange(len(values)))
    expected = values.clamp(-65504, 65504).half()
    for tensor in (pool.keys, pool.values):
        torch.testing.assert_close(tensor.view_as(expected), expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(tensor.view_as(expected).signbit(), expected.signbit())
