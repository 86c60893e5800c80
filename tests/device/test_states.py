"""Rows of models with states get the tokens that transformers generates, whatever is cut, moved, lost and retried."""

from copy import copy, deepcopy
from typing import Any

import numpy as np
import pytest
import torch

from batchrun.engine import runner as runners
from batchrun.engine.engine import Engine
from batchrun.engine.model import Model
from batchrun.engine.request import Completion, PooledHidden, Request, SamplingParams, TokenLogprobs
from batchrun.engine.runner import TorchRunner
from batchrun.engine.runner_options import RunnerOptions
from batchrun.engine.scheduler import SchedulerConfig
from batchrun.errors import ModelUnavailable, UsageError
from tests.device.tiny_families import VOCAB, WIDE, make_model

FAMILIES = ("lfm2", "lfm2_moe", "qwen3_next", "qwen3_5_text", "olmo_hybrid", "bamba", "granitemoehybrid")
BLOCK, NUM_NEW, NUM_SEQS = 4, 12, 5
LENGTHS = (1, 2, 3, 5, 17, 23, 9, 31)
# Qwen3.5 in float32 by its own code is 1e-4 from itself in float64, over the 42 tokens of the longest row.
ATOL = 3e-4


class Device:
    """A tiny model and what it says by transformers' own code."""

    def __init__(self, family: str) -> None:
        module = make_model(family, **WIDE)
        self.plain = deepcopy(module)
        self.model = Model.adopt(module)
        random = np.random.default_rng(1)
        self.prompts = [random.integers(3, VOCAB, length).astype(np.int32) for length in LENGTHS]
        # Three rows with one beginning, which cannot be shared.
        self.prompts += [np.concatenate([self.prompts[-1][:25], prompt]) for prompt in self.prompts[3:5]]
        self.texts = [self.generate(prompt) for prompt in self.prompts]

    @torch.inference_mode()
    def generate(self, prompt: Any) -> list[int]:
        ids = torch.from_numpy(prompt.astype(np.int64))[None]
        options = {"max_new_tokens": NUM_NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        found: list[int] = self.plain.generate(ids, attention_mask=torch.ones_like(ids), **options)[
            0, len(prompt) :
        ].tolist()
        return found

    def requests(self, **given: Any) -> list[Request]:
        sampling = SamplingParams(max_tokens=NUM_NEW)
        return [Request(row, ids, sampling, 20, **given) for row, ids in enumerate(self.prompts)]

    def options(self, num_blocks: int = 200, num_states: int = NUM_SEQS, **given: Any) -> RunnerOptions:
        block_bytes = sum(layer.block_bytes(BLOCK, torch.float32) for layer in self.model.kv_layers.values())
        # States take half of the memory at most.
        num_states = min(num_states, num_blocks * block_bytes // self.model.state_bytes)
        memory = num_blocks * block_bytes + num_states * self.model.state_bytes
        return RunnerOptions(block_size=BLOCK, max_num_seqs=num_states, kv_cache_memory=memory, **given)

    def runner(self, num_blocks: int = 200, num_states: int = NUM_SEQS, **given: Any) -> TorchRunner:
        return TorchRunner.lay_out(self.model, self.options(num_blocks, num_states, **given), ())


@pytest.fixture(scope="module", params=FAMILIES)
def device(request: pytest.FixtureRequest) -> Device:
    return Device(request.param)


@pytest.fixture(scope="module")
def lfm2() -> Device:
    return Device("lfm2")


def make_engine(runner: TorchRunner, **options: Any) -> Engine:
    settings: dict[str, Any] = {"max_num_seqs": NUM_SEQS, "max_num_batched_tokens": 17} | options
    config = SchedulerConfig(
        num_blocks=runner.num_blocks,
        num_host_slots=runner.num_host_slots,
        block_size=BLOCK,
        block_bytes=runner.block_bytes,
        eos_token_ids=frozenset(),
        num_state_slots=runner.num_state_slots,
        **settings,
    )
    return Engine(config, runner, decode=lambda ids: "")


def run(runner: TorchRunner, requests: list[Request], **options: Any) -> tuple[dict[int, Completion], Engine]:
    """Between steps every slot that is nobody's is spoilt; `check` sees that no two rows have one."""
    engine = make_engine(runner, **options)
    for request in requests:
        engine.add(request)
    found: dict[int, Completion] = {}
    while engine.has_work:
        found |= {one.row_idx: one for one in engine.step()}
        engine.check()
        spoil(runner, engine)
    return found, engine


def spoil(runner: TorchRunner, engine: Engine) -> None:
    states, free = runner._shard.cache.states, engine.scheduler.blocks._free_state_slots
    assert states is not None
    if not runner.overlaps:  # else a step in flight may still write there
        states.commit()
        for each in states.states.values():
            each[free] = torch.nan


def texts(found: dict[int, Completion]) -> list[list[int]]:
    return [list(found[row].token_ids) for row in sorted(found)]


@pytest.mark.parametrize("budget", [1, 3, 17])
@pytest.mark.parametrize("overlaps", [False, True])
def test_ragged_prompts_cut_in_chunks_beside_decodes(device: Device, budget: int, overlaps: bool) -> None:
    runner = device.runner()
    runner.overlaps = overlaps
    found, engine = run(runner, device.requests(), max_num_batched_tokens=budget, num_free_tokens=8)
    assert texts(found) == device.texts
    counters = engine.statistics().counters
    assert counters.cached_tokens == counters.drafted_tokens == 0


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("budget", [17, 40])
def test_rows_that_had_to_leave(device: Device, preemption: str, budget: int) -> None:
    runner = device.runner(num_blocks=14)
    found, engine = run(runner, device.requests(), max_num_batched_tokens=budget, preemption=preemption)
    assert texts(found) == device.texts
    counters = engine.statistics().counters
    assert counters.preemptions == getattr(counters, f"{preemption}_preemptions") > 0
    assert (counters.recomputed_tokens > 0) == (preemption == "recompute")


def test_no_more_rows_run_than_there_are_slots(lfm2: Device) -> None:
    engine = make_engine(lfm2.runner(num_states=2))
    for request in lfm2.requests():
        engine.add(request)
    most, found = 0, []
    while engine.has_work:
        found += engine.step()
        engine.check()
        most = max(most, engine.statistics().num_running)
    assert most == 2
    assert texts({one.row_idx: one for one in found}) == lfm2.texts


@pytest.mark.parametrize("num_steps", [1, 4, 11, 20])
def test_what_a_killed_process_had_said_is_gone_on_with(device: Device, num_steps: int) -> None:
    """A new engine computes the states again, out of prompts and saved tokens."""
    engine, ended = make_engine(device.runner()), []
    for request in device.requests():
        engine.add(request)
    for _ in range(num_steps):
        ended += engine.step()
    saved = {row.row_idx: row.output_ids for row in engine.in_flight()}
    done = {one.row_idx: one for one in ended}
    again = [
        Request(one.row_idx, one.token_ids, one.sampling, output_ids=saved.get(one.row_idx, ()))
        for one in device.requests()
        if one.row_idx not in done
    ]
    found, _ = run(device.runner(num_blocks=14), again)
    assert any(saved.values()) or num_steps == 1
    assert texts(done | found) == device.texts


class Failing:
    """A module that fails once its layers have computed and left their states, of steps for which `fails`."""

    def __init__(self, module: Any, fails: Any, error: Exception) -> None:
        self._module, self._fails, self._error = module, fails, error

    def __call__(self, **arguments: Any) -> Any:
        output = self._module(**arguments)
        if self._fails(arguments["input_ids"]):
            raise self._error
        return output


def altered(device: Device, fails: Any, error: Exception) -> Model:
    model = copy(device.model)
    model._module, model.greedy_head = Failing(model._module, fails, error), None
    return model


def test_a_step_without_the_memory_goes_on_from_the_states_before_it(lfm2: Device) -> None:
    runner = lfm2.runner()
    runner._shard.model = altered(lfm2, lambda ids: ids.numel() > 6, torch.OutOfMemoryError("no memory"))
    found, engine = run(runner, lfm2.requests())
    assert texts(found) == lfm2.texts
    assert engine.scheduler._budget < 17


def test_a_row_that_fails_leaves_the_others_as_they_would_be(lfm2: Device) -> None:
    runner, whole = lfm2.runner(), [{*ids.tolist(), *lfm2.texts[row]} for row, ids in enumerate(lfm2.prompts)]
    bad = min(lfm2.prompts[4].tolist(), key=lambda token: sum(token in tokens for tokens in whole))
    rows = [row for row, tokens in enumerate(whole) if bad not in tokens]
    runner._shard.model = altered(lfm2, lambda ids: bool((ids == bad).any()), RuntimeError("a bad token"))
    found, _ = run(runner, lfm2.requests())
    assert [list(found[row].token_ids) for row in rows] == [lfm2.texts[row] for row in rows]
    assert len(rows) > 4
    assert found[4].error is not None


def test_samples_of_one_prompt_are_what_each_is_alone(lfm2: Device) -> None:
    sampled = [SamplingParams(max_tokens=NUM_NEW, temperature=1.0, seed=seed) for seed in range(4)]
    requests = [Request(row, lfm2.prompts[5], sampling, 22) for row, sampling in enumerate(sampled)]
    together, engine = run(lfm2.runner(), requests)
    alone = {row: run(lfm2.runner(), [request])[0][row] for row, request in enumerate(requests)}
    assert texts(together) == texts(alone)
    assert len({tuple(text) for text in texts(together)}) > 1
    assert engine.statistics().counters.cached_tokens == 0


@pytest.mark.parametrize("num_blocks", [200, 14])
def test_what_is_read_of_rows_is_what_the_model_has_alone(device: Device, num_blocks: int) -> None:
    """Log-probabilities, and the mean of hidden states: of rows that begin alike, cut in chunks."""
    with torch.inference_mode():
        outputs = [
            device.plain(torch.from_numpy(ids.astype(np.int64))[None], output_hidden_states=True, use_cache=False)
            for ids in device.prompts
        ]
    scored, pooled = [], []
    for row, ids in enumerate(device.prompts):
        places = np.arange(len(ids) - 1, dtype=np.int32)
        if len(places):
            reads = TokenLogprobs(places, ids[places + 1])
            scored.append(Request(row, ids[:-1], SamplingParams(max_tokens=0), 9, reads=reads))
        pooled.append(Request(row, ids, SamplingParams(max_tokens=0), 9, reads=PooledHidden("mean")))
    found, _ = run(device.runner(num_blocks, reads=True), scored)
    for request in scored:
        theirs = outputs[request.row_idx].logits[0, :-1].double().log_softmax(-1)
        expected = theirs.gather(1, torch.from_numpy(device.prompts[request.row_idx][1:].astype(np.int64))[:, None])
        assert np.abs(found[request.row_idx].readings[:, 0] - expected[:, 0].numpy()).max() < ATOL
    found, _ = run(device.runner(num_blocks, reads=True), pooled)
    for row, output in enumerate(outputs):
        expected = output.hidden_states[-1][0].double().mean(0)
        assert np.abs(found[row].readings - expected.numpy()).max() < ATOL


def test_the_comparison_sees_a_lost_state(lfm2: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchrun.engine.state_pool.StatePool.read", lost)
    found, _ = run(lfm2.runner(), lfm2.requests())
    assert sum(ours != theirs for ours, theirs in zip(texts(found), lfm2.texts, strict=True)) > 5


def lost(pool: Any, layer: int) -> Any:
    return torch.zeros_like(pool.states[layer][pool._step.state_slots])


def test_a_lost_state_is_refused_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchrun.engine.state_pool.StatePool.read", lost)
    with pytest.raises(ModelUnavailable, match="different logits over blocks than alone"):
        Model.adopt(make_model("lfm2"))


def test_a_layer_that_computes_something_else_is_refused_by_name() -> None:
    module = make_model("lfm2")
    layer = module.model.layers[2].conv
    plain = layer.forward
    layer.forward = lambda *given, **named: plain(*given, **named) * 1.01
    with pytest.raises(ModelUnavailable, match="Lfm2ForCausalLM has layers of type conv whose states cannot be kept"):
        Model.adopt(module)


def test_determinism_is_refused() -> None:
    with pytest.raises(ModelUnavailable, match=r"Lfm2ForCausalLM keeps states, .*--deterministic"):
        Model.adopt(make_model("lfm2"), is_deterministic=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_served_too(dtype: torch.dtype) -> None:
    model = Model.adopt(make_model("lfm2", **WIDE).to(dtype))
    assert model.state_bytes == 2 * 2 * WIDE["hidden_size"] * 2


def test_keys_and_values_in_halves_leave_states_as_they_are(lfm2: Device) -> None:
    model = Model.adopt(make_model("lfm2", **WIDE), torch.float16)
    assert (model.kv_place.dtype, model.state_bytes) == (torch.float16, lfm2.model.state_bytes)


def test_int8_weights_are_served_too(lfm2: Device) -> None:
    model = Model.adopt(make_model("lfm2", **WIDE), quantization="int8")
    assert model.state_bytes == lfm2.model.state_bytes


def test_memory_is_said_and_slots_take_half_of_it_at_most(lfm2: Device, caplog: pytest.LogCaptureFixture) -> None:
    """Two layers of two inputs of 32 float32 each."""
    assert lfm2.model.state_bytes == 2 * 2 * 32 * 4
    with caplog.at_level("INFO", logger=runners.__name__):
        facts = lfm2.runner(num_blocks=20, num_states=6).facts
    assert (facts.num_blocks, facts.num_state_slots, facts.state_bytes) == (20, 6, 6 * 512)
    assert "20 blocks of 4 tokens for keys and values in float32 (0.00 GiB), states of 6 rows (0.00 GiB)" in caplog.text
    options = RunnerOptions(block_size=BLOCK, max_num_seqs=1000, kv_cache_memory=100 * 512)
    facts = TorchRunner.lay_out(lfm2.model, options, ()).facts
    assert facts.num_state_slots == 50
    assert facts.pool_bytes + facts.state_bytes <= 100 * 512
    with pytest.raises(UsageError, match="hold no block"):
        TorchRunner.lay_out(lfm2.model, RunnerOptions(block_size=BLOCK, kv_cache_memory=512), ())
