"""What is read of rows equals what transformers computes for each row alone, however the engine cut and shared them."""

from typing import Any

import numpy as np
import pytest
import torch

from batchrun.engine import reading
from batchrun.engine.engine import Engine
from batchrun.engine.model import Model
from batchrun.engine.request import Completion, PooledHidden, Request, SamplingParams, TokenIds, TokenLogprobs
from batchrun.engine.runner import TorchRunner
from batchrun.engine.runner_options import RunnerOptions
from batchrun.engine.scheduler import SchedulerConfig
from tests.device.tiny_families import WIDE, make_model

BLOCK = 4
ATOL = 1e-4
# Plain, softcapped logits, scaled logits, experts, and a head's bias or norm of its own.
FAMILIES = ["llama", "gemma2", "granite", "cohere", "mixtral", "gpt2", "phi"]


def rows() -> list[TokenIds]:
    """Two prompts with three endings each, and a row of its own."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, 67, size=length) for length in (23, 9)]
    endings = [rng.integers(3, 67, size=length) for length in (1, 6, 3)]
    found = [np.concatenate([prompt, ending]) for prompt in prompts for ending in endings]
    return [row.astype(np.int32) for row in sorted([*found, rng.integers(3, 67, size=40)], key=list)]


def plain(module: Any, ids: TokenIds) -> Any:
    """By the model's own code; before its modules are replaced."""
    with torch.inference_mode():
        return module(
            input_ids=torch.from_numpy(ids.astype(np.int64))[None], output_hidden_states=True, use_cache=False
        )


def run(module: Any, requests: list[Request], *, num_blocks: int = 17, budget: int = 11) -> dict[int, Completion]:
    model = Model.adopt(module)
    block_bytes = sum(layer.block_bytes(BLOCK, model.kv_place.dtype) for layer in model.kv_layers.values())
    options = RunnerOptions(block_size=BLOCK, kv_cache_memory=num_blocks * block_bytes, reads=True)
    runner = TorchRunner.lay_out(model, options, ())
    config = SchedulerConfig(
        num_blocks=runner.num_blocks,
        num_host_slots=runner.num_host_slots,
        block_size=BLOCK,
        block_bytes=runner.block_bytes,
        max_num_seqs=5,
        max_num_batched_tokens=budget,
        eos_token_ids=frozenset(),
    )
    engine = Engine(config, runner, decode=lambda ids: "")
    for request in requests:
        engine.add(request)
    done = {}
    while engine.has_work:
        done |= {one.row_idx: one for one in engine.step()}
        engine.check()
    return done


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_are_those_of_the_model_alone(family, monkeypatch):
    monkeypatch.setattr(reading, "_POSITIONS_AT_ONCE", 3)
    module, found = make_model(family, **WIDE), rows()
    expected = [plain(module, ids).logits[0].double().log_softmax(-1) for ids in found]
    requests = []
    for row, ids in enumerate(found):
        positions = np.arange(len(ids) - 8 if row % 2 else 0, len(ids) - 1, dtype=np.int32)
        reads = TokenLogprobs(positions, ids[positions + 1])
        requests.append(Request(row, ids[:-1], SamplingParams(max_tokens=0), 9, reads=reads))
    done = run(module, requests)
    for request in requests:
        at, ids = request.reads.positions, torch.from_numpy(request.reads.token_ids.astype(np.int64))
        theirs = expected[request.row_idx][at]
        ours = done[request.row_idx].readings
        assert np.abs(ours[:, 0] - theirs.gather(1, ids[:, None])[:, 0].numpy()).max() < ATOL
        assert ours[:, 1].tolist() == (theirs.argmax(-1) == ids).double().tolist()


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_pooled_states_are_those_behind_the_last_norm(family, pooling):
    module, found = make_model(family, **WIDE), rows()
    states = [plain(module, ids).hidden_states[-1][0].double().numpy() for ids in found]
    requests = [
        Request(row, ids, SamplingParams(max_tokens=0), 9, reads=PooledHidden(pooling)) for row, ids in enumerate(found)
    ]
    done = run(module, requests)
    for row, state in enumerate(states):
        expected = state[-1] if pooling == "last" else state.mean(axis=0)
        assert np.abs(done[row].readings - expected).max() < ATOL * max(1, np.abs(expected).max())


def test_the_head_gets_no_more_positions_at_once_than_it_may_and_only_those_that_are_read(monkeypatch):
    """Logits of a whole step were what memory ran out for."""
    monkeypatch.setattr(reading, "_POSITIONS_AT_ONCE", 4)
    module = make_model("llama", **WIDE)
    ids = rows()[0][:20]
    reads = TokenLogprobs(np.arange(7, 19, dtype=np.int32), ids[8:20])
    sizes: list[int] = []
    module.lm_head.register_forward_hook(lambda layer, args, output: sizes.append(args[0].shape[1]))
    monkeypatch.setattr("batchrun.engine.model.layer_kernels", lambda *args: None)  # which would take the hook away
    model = Model.adopt(module)
    runner = TorchRunner.lay_out(model, RunnerOptions(block_size=BLOCK, kv_cache_memory=1 << 20, reads=True), ())
    sizes.clear()
    config = SchedulerConfig(
        num_blocks=runner.num_blocks,
        num_host_slots=0,
        block_size=BLOCK,
        block_bytes=runner.block_bytes,
        max_num_seqs=5,
        max_num_batched_tokens=64,
        eos_token_ids=frozenset(),
    )
    engine = Engine(config, runner, decode=lambda ids: "")
    engine.add(Request(0, ids[:-1], SamplingParams(max_tokens=0), reads=reads))
    (one,) = engine.step()
    assert len(one.readings) == 12
    assert sizes == [4, 4, 4]


def test_a_rows_log_probabilities_do_not_depend_on_the_rows_beside_it():
    """What --deterministic promises of scores rests on this."""
    logits = torch.randn(17, 4999) * 5
    together = logits.log_softmax(-1)
    for rows_at_once in (1, 2, 5, 16):
        for first in range(0, 17, rows_at_once):
            some = slice(first, first + rows_at_once)
            assert torch.equal(logits[some].log_softmax(-1), together[some])
