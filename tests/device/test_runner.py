"""Whole steps through a runner: greedy rows equal transformers' own generation however they are cut and moved."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batchrun.checkpoint import resolve
from batchrun.engine.batch import pack
from batchrun.engine.memory import free_host_bytes
from batchrun.engine.model import Model
from batchrun.engine.request import SamplingParams
from batchrun.engine.runner import TorchRunner
from batchrun.engine.runner_options import RunnerOptions, choose_device, choose_dtype
from batchrun.engine.sequence import Sequence
from batchrun.engine.step import ScheduledBatch, SwapIn, SwapOut
from batchrun.errors import ModelUnavailable, UsageError
from batchrun_kernels import native
from tests.device.steps import Blocks, advance, make_sequence, next_item
from tests.device.tiny_families import VOCAB, make_model

BLOCK, NUM_NEW = 4, 9
OPTIONS = RunnerOptions(block_size=BLOCK, kv_cache_memory=40 * BLOCK * 2 * 2 * 2 * 6 * 4, swap_space=7 * 768)


@pytest.fixture(scope="module", params=[6, 8])
def head_dim(request: pytest.FixtureRequest) -> int:
    """6: torch's attention, 8: that in C, where there is any."""
    width: int = request.param
    return width


@pytest.fixture(scope="module")
def module(head_dim: int) -> Any:
    return make_model("llama", seed=5, head_dim=head_dim)


@pytest.fixture
def runner(head_dim: int) -> TorchRunner:
    """A pool of 40 blocks and 7 on the host."""
    block_bytes = BLOCK * 2 * 2 * 2 * head_dim * 4
    options = replace(OPTIONS, kv_cache_memory=40 * block_bytes, swap_space=7 * block_bytes)
    return TorchRunner.lay_out(Model.adopt(make_model("llama", seed=5, head_dim=head_dim)), options, eos_token_ids=())


def make_prompts() -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(3, VOCAB, length).tolist() for length in (1, 17, 23)]


@torch.inference_mode()
def generate(module: Any, ids: list[int]) -> list[int]:
    """Greedy, by transformers alone, without any cache."""
    grown = list(ids)
    for _ in range(NUM_NEW):
        grown.append(int(module(input_ids=torch.tensor([grown]), use_cache=False).logits[0, -1].argmax()))
    return grown[len(ids) :]


def run(runner: TorchRunner, sequences: list[Sequence], budget: int) -> None:
    while waiting := [one for one in sequences if one.output_len < NUM_NEW]:
        items = []
        left = budget
        for sequence in waiting:
            if left:
                items.append(next_item(sequence, left))
                left -= items[-1].num_tokens
        batch = ScheduledBatch(tuple(items))
        advance(batch, runner.launch(batch).wait())


@pytest.mark.parametrize("budget", [1, 7, 111])
def test_greedy_rows_equal_plain_generation(module: Any, runner: TorchRunner, budget: int) -> None:
    prompts = make_prompts()
    blocks = Blocks(runner.num_blocks)
    sequences = [make_sequence(row, ids, blocks.take(9)) for row, ids in enumerate(prompts)]
    run(runner, sequences, budget)
    assert [list(one.output_ids) for one in sequences] == [generate(module, ids) for ids in prompts]


def test_a_swapped_row_goes_on_with_identical_tokens(module: Any, runner: TorchRunner) -> None:
    """Out of its blocks, which another row overwrites in the same step, and back into others."""
    prompts = make_prompts()
    blocks = Blocks(runner.num_blocks)
    moved = make_sequence(0, prompts[1], blocks.take(7))
    first = ScheduledBatch((next_item(moved, 99),))
    advance(first, runner.launch(first).wait())
    other = make_sequence(1, prompts[2], [*moved.block_table[:5], *blocks.take(3)])
    host_slots = (6, 2, 0, 1, 4)
    batch = ScheduledBatch((next_item(other, 99),), swap_outs=(SwapOut(tuple(moved.block_table[:5]), host_slots),))
    sampled = runner.launch(batch).wait()
    advance(batch, sampled)
    assert sampled.swap_bytes == 5 * runner.block_bytes
    assert sampled.swap_seconds > 0
    moved.block_table = blocks.take(7)
    back = SwapIn(host_slots, tuple(moved.block_table[:5]))
    batch = ScheduledBatch((next_item(moved, 1), next_item(other, 1)), swap_ins=(back,))
    advance(batch, runner.launch(batch).wait())
    run(runner, [moved, other], budget=8)
    assert [list(moved.output_ids), list(other.output_ids)] == [generate(module, ids) for ids in prompts[1:]]


def test_blocks_swapped_out_and_in_by_one_step_pass_through_the_host(runner: TorchRunner) -> None:
    """The pool may be full: a row comes back into the blocks that leave in the same step."""
    keys = [pool.keys for pool in runner._shard.cache.pools.values()]
    for pool in runner._shard.cache.pools.values():
        for tensor in (pool.keys, pool.values):
            tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape))
    before = [tensor.clone() for tensor in keys]
    runner._shard.host.copy_out((3, 8), (0, 1))
    runner._shard.host.copy_out((5,), (2,))
    runner._shard.host.copy_in((2, 0), (8, 5))
    for now, then in zip(keys, before, strict=True):
        assert torch.equal(now[8], then[5])
        assert torch.equal(now[5], then[3])


def test_a_step_in_which_no_row_ends_samples_nothing(runner: TorchRunner) -> None:
    sequence = make_sequence(0, make_prompts()[1], [1, 2, 3, 4, 5])
    sampled = runner.launch(ScheduledBatch((next_item(sequence, 16),))).wait()
    assert sampled.tokens.tolist() == []


def test_stop_tokens_are_held_back_until_min_tokens(runner: TorchRunner) -> None:
    free = make_sequence(0, make_prompts()[1], list(range(9)))
    batch = ScheduledBatch((next_item(free, 99),))
    best = int(runner.launch(batch).wait().tokens[0])
    held = make_sequence(0, make_prompts()[1], list(range(9)), SamplingParams(min_tokens=1, stop_token_ids=(best,)))
    batch = ScheduledBatch((next_item(held, 99),))
    assert int(runner.launch(batch).wait().tokens[0]) != best


def test_facts_say_what_was_laid_out(runner: TorchRunner, head_dim: int) -> None:
    """Heads of 8 are for the C kernels, where there are any."""
    facts = runner.facts
    kernel = "c" if native.find() is not None and head_dim == 8 else "torch"
    assert (facts.device, facts.dtype, facts.kernel) == ("cpu", "float32", kernel)
    assert runner.block_bytes == BLOCK * 2 * 2 * 2 * head_dim * 4
    assert (facts.num_blocks, facts.pool_bytes) == (40, 40 * runner.block_bytes)
    assert (runner.num_host_slots, facts.host_bytes) == (7, 7 * runner.block_bytes)


def test_a_saved_model_is_loaded_from_its_folder(module: Any, tmp_path: Path) -> None:
    module.save_pretrained(tmp_path)
    checkpoint = resolve(str(tmp_path), revision=None, cache=tmp_path, trust_remote_code=False)
    runner = TorchRunner.build(checkpoint, OPTIONS)
    sequence = make_sequence(0, make_prompts()[2], list(range(9)))
    run(runner, [sequence], budget=99)
    assert list(sequence.output_ids) == generate(module, make_prompts()[2])


def test_memory_for_less_than_a_block_is_refused_with_the_remedy() -> None:
    options = RunnerOptions(block_size=BLOCK, kv_cache_memory=10)
    with pytest.raises(UsageError, match="raise --kv-cache-memory"):
        TorchRunner.lay_out(Model.adopt(make_model("llama")), options, eos_token_ids=())


def test_a_missing_gpu_is_refused_and_auto_means_float32_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == torch.device("cpu")
    assert choose_dtype("auto", torch.device("cpu")) == torch.float32
    assert choose_dtype("bfloat16", torch.device("cpu")) == torch.bfloat16
    with pytest.raises(ModelUnavailable, match="no usable CUDA device"):
        choose_device("cuda")


def test_a_containers_limit_bounds_the_memory_taken_for_free(tmp_path: Path) -> None:
    unlimited = free_host_bytes(tmp_path)
    assert unlimited > 1 << 20
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    assert free_host_bytes(tmp_path) == 2000000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_host_bytes(tmp_path) > 1 << 20


@pytest.mark.skipif(native.find() is None, reason="needs the C kernels: a C compiler at installation")
def test_keys_and_values_in_float16_take_half_the_memory_for_nearly_the_same_logits() -> None:
    whole = TorchRunner.lay_out(Model.adopt(make_model("llama", seed=5, head_dim=8)), OPTIONS, eos_token_ids=())
    model = Model.adopt(make_model("llama", seed=5, head_dim=8), torch.float16)
    runner = TorchRunner.lay_out(model, OPTIONS, eos_token_ids=())
    assert (whole.facts.kv_dtype, runner.facts.kv_dtype, runner.facts.dtype) == ("float32", "float16", "float32")
    assert (runner.block_bytes, runner.num_blocks) == (whole.block_bytes // 2, whole.num_blocks * 2)
    pools = runner._shard.cache.pools.values()
    held = sum(tensor.numel() * tensor.element_size() for pool in pools for tensor in (pool.keys, pool.values))
    assert held == runner.facts.pool_bytes
    found = []
    for one in (whole, runner):
        sequence = make_sequence(0, make_prompts()[2], Blocks(one.num_blocks).take(7))
        batch = pack(ScheduledBatch((next_item(sequence, 99),)), BLOCK, torch.device("cpu"))
        with torch.inference_mode():
            found.append(one._shard.logits(batch))
    # Eleven bits of keys and values through two layers; logits reach 8.
    assert 0 < (found[0] - found[1]).abs().max() < 2e-2


def test_float16_keys_are_refused_where_no_attention_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "find", lambda: None)
    with pytest.raises(ModelUnavailable, match="the torch attention keeps keys and values in float32 here, not in fl"):
        Model.adopt(make_model("llama", head_dim=8), torch.float16)
