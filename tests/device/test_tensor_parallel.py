"""Two ranks give one rank's tokens, from one scheduler and one tree; what fails ends the job with its reason."""

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from batchrun.checkpoint import Checkpoint, resolve
from batchrun.divisible import require_divisible
from batchrun.engine import ranks as subject
from batchrun.engine.follower import carry_out
from batchrun.engine.group import Group, require_devices
from batchrun.engine.model import Model
from batchrun.engine.orders import Logits, Order
from batchrun.engine.ranks import LedShards, Ranks
from batchrun.engine.request import Request, SamplingParams, TokenLogprobs
from batchrun.engine.runner import TorchRunner
from batchrun.engine.runner_options import RunnerOptions
from batchrun.engine.sequence import Sequence
from batchrun.engine.shard import Shard
from batchrun.engine.step import Item, ScheduledBatch
from batchrun.errors import EngineFailed, ModelUnavailable
from tests.device.divided_families import make_divisible
from tests.device.family_matrix import BLOCK, NUM_BLOCKS, make_rows, run_rows

# What a block of the tiny models takes: 2 layers, keys and values, 2 heads of 8 floats.
BLOCK_BYTES = BLOCK * 2 * 2 * 2 * 8 * 4
ONE = RunnerOptions(block_size=BLOCK, kv_cache_memory=NUM_BLOCKS * BLOCK_BYTES, swap_space=3 * BLOCK_BYTES, reads=True)
# Each rank keeps half of a block's keys and values.
TWO = replace(ONE, kv_cache_memory=ONE.kv_cache_memory // 2, swap_space=ONE.swap_space // 2, num_ranks=2)


def saved(family: str, folder: Path, **changes: Any) -> Checkpoint:
    make_divisible(family).save_pretrained(folder)
    return resolve(str(folder), revision=None, cache=folder, trust_remote_code=False)


@contextmanager
def running(checkpoint: Checkpoint, options: RunnerOptions) -> Iterator[TorchRunner]:
    runner = TorchRunner.build(checkpoint, options)
    try:
        yield runner
    finally:
        runner.close()


def children() -> list[psutil.Process]:
    return psutil.Process().children()


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral"])
def test_two_ranks_give_one_ranks_tokens_and_readings(family: str, tmp_path: Path) -> None:
    """Though rows are cut, share blocks and are preempted both ways; each rank has half of a block's bytes."""
    checkpoint, rows = saved(family, tmp_path), make_rows()
    whole = TorchRunner.build(checkpoint, ONE)
    expected, expected_counters = run_rows(whole, rows)
    with running(checkpoint, TWO) as runner:
        assert len(children()) == 1
        assert (runner.block_bytes, runner.num_blocks) == (whole.block_bytes // 2, whole.num_blocks)
        got, counters = run_rows(runner, rows)
        assert got == expected
        assert min(counters.swap_preemptions, counters.recompute_preemptions, counters.cached_tokens) > 0
        assert counters.cached_tokens == expected_counters.cached_tokens
        assert np.abs(logprobs(runner, rows[0]) - logprobs(whole, rows[0])).max() < 1e-4
    assert children() == []
    assert not torch.distributed.is_initialized()


def logprobs(runner: TorchRunner, ids: list[int]) -> Any:
    """Of every token of a row but the first."""
    tokens = np.array(ids, np.int32)
    reads = TokenLogprobs(np.arange(len(ids) - 1, dtype=np.int32), tokens[1:])
    sequence = Sequence(Request(0, tokens[:-1], SamplingParams(max_tokens=0), reads=reads), arrival=0)
    sequence.block_table = list(range(-(-len(ids) // BLOCK)))
    (found,) = runner.launch(ScheduledBatch((Item(sequence, 0, len(ids) - 1, samples=False),))).wait().readings
    return found[:, 0]


class Recorder:
    """Stands for the other ranks: keeps what they are told, as it would come to them."""

    def __init__(self) -> None:
        self.orders: list[Order] = []

    @contextmanager
    def doing(self, order: Order) -> Iterator[None]:
        self.orders.append(pickle.loads(pickle.dumps(order)))
        yield


def test_a_follower_needs_the_orders_and_nothing_else_to_compute_what_rank_0_computes() -> None:
    """The block tables are in them: they are those of the one scheduler and the one tree."""
    shards = [Shard.lay_out(Model.adopt(make_divisible("llama")), ONE) for _ in range(2)]
    logits: list[list[torch.Tensor]] = [[], []]
    for shard, found in zip(shards, logits, strict=True):
        keep(shard, found)
    recorder = Recorder()
    led = LedShards(shards[0], recorder, Group(0, 2, torch.device("cpu")))  # type: ignore[arg-type]
    run_rows(TorchRunner(shards[0], (), led), make_rows())
    kinds = {type(order).__name__ for order in recorder.orders}
    assert kinds == {"SwapOut", "SwapIn", "Logits"}
    for order in recorder.orders:
        with torch.inference_mode():
            carry_out(order, shards[1], Group(1, 2, torch.device("cpu")))
    assert len(logits[0]) == len(logits[1]) > 9
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*logits, strict=True))
    tables = [order.step.block_table for order in recorder.orders if isinstance(order, Logits)]
    assert max(int(table.max()) for table in tables) < NUM_BLOCKS
    assert any(len(set(table[:, 0].tolist())) < len(table) for table in tables), "no rows share a block"


def keep(shard: Shard, found: list[torch.Tensor]) -> None:
    """Every logits that the shard computes also go to `found`."""
    compute = shard.model.forward

    def forward(*arguments: Any) -> torch.Tensor:
        found.append(compute(*arguments))
        return found[-1].clone()

    shard.model.forward = forward  # type: ignore[method-assign]


def test_a_followers_process_has_neither_scheduler_nor_tree() -> None:
    code = (
        "import sys, batchrun.engine.follower; "
        "print(sorted(name.split('.')[-1] for name in sys.modules if name.startswith('batchrun.engine.')))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "shard" in result.stdout
    for name in ("scheduler", "admission", "block_manager", "engine", "runner"):
        assert f"'{name}'" not in result.stdout


def test_a_rank_that_is_killed_in_the_middle_of_a_step_ends_the_job_and_says_so(tmp_path: Path) -> None:
    with running(saved("llama", tmp_path), TWO) as runner:
        (other,) = children()
        module = runner._shard.model._module

        def kill(*_: Any) -> None:
            os.kill(other.pid, signal.SIGKILL)

        module.model.layers[1].register_forward_pre_hook(kill)
        with pytest.raises(EngineFailed, match="rank 1 of 2 has failed: killed by signal 9"):
            run_rows(runner, make_rows())


def test_a_rank_that_cannot_load_ends_the_job_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere(Ranks):
        def start(self, checkpoint: Checkpoint, options: RunnerOptions) -> Group:
            return super().start(replace(checkpoint, folder=tmp_path / "nowhere"), options)

    monkeypatch.setattr(subject, "Ranks", Elsewhere)
    with pytest.raises(ModelUnavailable, match=r"rank 1 of 2 has failed: .*nowhere cannot be loaded"):
        TorchRunner.build(saved("llama", tmp_path), TWO)
    assert children() == []


def test_ranks_end_when_rank_0_is_killed_while_they_wait_for_it(tmp_path: Path) -> None:
    """In a call of the group, which by itself waits for half an hour."""
    code = (
        "import sys, time; from pathlib import Path\n"
        "from batchrun.checkpoint import Checkpoint\n"
        "from batchrun.engine.orders import Start; from batchrun.engine.ranks import Group, Ranks, RunnerOptions\n"
        "ranks = Ranks(2); follower = ranks._followers[0]; store = Group.meeting_place(2)\n"
        "follower.connection.recv()\n"
        "follower.connection.send(Start(1, store.port, 'cpu', 1, None, RunnerOptions(num_ranks=2)))\n"
        "while not store.num_keys(): time.sleep(0.1)\n"
        "print(follower.process.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as zero:
        assert zero.stdout is not None
        other = psutil.Process(int(zero.stdout.readline()))
        zero.kill()
    other.wait(60)


@pytest.mark.parametrize(
    ("family", "num_ranks", "reason"),
    [
        ("gpt2", 2, "transformers has no plan for dividing GPT2LMHeadModel; leave out --tensor-parallel"),
        ("lfm2", 2, "Lfm2ForCausalLM keeps states, which are not divided"),
        ("llama", 3, "4 heads of attention and 2 of keys and values, which 3 ranks cannot share evenly; .* can be 2$"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused_by_name(
    family: str, num_ranks: int, reason: str, tmp_path: Path
) -> None:
    make_divisible(family).save_pretrained(tmp_path)
    with pytest.raises(ModelUnavailable, match=reason):
        require_divisible(tmp_path, num_ranks, trust_remote_code=False)


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    require_devices(torch.device("cuda"), 2)
    with pytest.raises(ModelUnavailable, match="--tensor-parallel 4 needs as many GPUs; there are 2"):
        require_devices(torch.device("cuda"), 4)
    with pytest.raises(ModelUnavailable, match="leave out --device cpu"):
        require_devices(torch.device("cpu"), 2)
