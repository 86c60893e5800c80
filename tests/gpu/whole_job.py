"""A job end to end: an 8B-shaped Llama with random weights, tokens a second beside what the device allows at most."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from batchrun.engine.model import Model
from batchrun.engine.request import Request, SamplingParams
from batchrun.engine.runner import TorchRunner
from batchrun.engine.runner_options import RunnerOptions
from batchrun_kernels.triton.bench.peak import Peak
from tests.gpu.device import assumed, peak_of
from tests.gpu.engine import run_engine
from tests.gpu.part import Machine, Part, Result, attempt


@dataclass(frozen=True, slots=True)
class _Job:
    """Rows of the same lengths, in waves of `seats`; sizes are a Llama configuration's."""

    rows: int
    seats: int
    prompt_len: int
    output_len: int
    hidden: int = 4096
    inner: int = 14336
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    vocab: int = 128256

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def layer_weights(self) -> int:
        """Of all layers, without the embedding and the output layer."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        return self.layers * (attention + 3 * self.hidden * self.inner)

    def floor_s(self, peak: Peak) -> float:
        """Every prompt token through the layers once, then a step for each output token of each wave."""
        prompt_flops = 2 * self.layer_weights * self.prompt_len + self._attention_flops(self.prompt_len) / 2
        prefill_s = self.rows * peak.floor_s(0, int(prompt_flops))
        weights = self.layer_weights + self.vocab * self.hidden
        token_bytes = 2 * 2 * self.layers * self.kv_heads * self.head_dim
        decode_s = 0.0
        for grown in range(self.output_len - 1):
            context = self.prompt_len + grown + 1
            moved = 2 * weights + self.seats * context * token_bytes
            flops = self.seats * (2 * weights + self._attention_flops(context) // context)
            decode_s += peak.floor_s(moved, flops)
        return prefill_s + decode_s * self.rows / self.seats

    def _attention_flops(self, context: int) -> int:
        """Of as many queries as keys, without the causal half."""
        return 4 * self.layers * self.heads * self.head_dim * context * context


_JOB = _Job(rows=512, seats=256, prompt_len=512, output_len=128)
_TINY = _Job(rows=4, seats=2, prompt_len=9, output_len=3, hidden=64, inner=96, layers=2, heads=4, kv_heads=2, vocab=67)


def plan() -> Iterator[str]:
    job, peak = _JOB, assumed()
    floor_s, weights = job.floor_s(peak), job.layer_weights + 2 * job.vocab * job.hidden
    yield (
        f"{job.rows} rows of {job.prompt_len} prompt and {job.output_len} output tokens, {job.seats} at once, through a"
        f" Llama of {weights / 1e9:.2f} G random bfloat16 weights: floor {floor_s:.1f} s, "
        f"{job.rows * job.output_len / floor_s:,.0f} output tokens a second"
    )


def run(machine: Machine) -> Iterator[Result]:
    yield attempt("job", "llama 8B" if machine.is_gpu else "tiny llama", lambda: _run(machine))


def _run(machine: Machine) -> Result:
    job = _JOB if machine.is_gpu else _TINY
    dtype = torch.bfloat16 if machine.is_gpu else torch.float32
    model = Model.adopt(_module(job, dtype, machine.device))
    # Nothing is swapped here, and locking much of the host's memory takes seconds.
    options = RunnerOptions(kv_cache_memory=None if machine.is_gpu else 1 << 20, swap_space=1 << 26)
    runner = TorchRunner.lay_out(model, options, eos_token_ids=())
    warm = run_engine(runner, _requests(job, job.seats // 8 + 1, 4, first=job.rows), seats=job.seats)
    ran = run_engine(runner, _requests(job, job.rows, job.output_len), seats=job.seats)
    lens = {len(tokens) for tokens in ran.tokens.values()}
    is_right = len(ran.tokens) == job.rows and lens == {job.output_len}
    made = ran.counters.output_tokens
    words = f"{model.attention.name} attention, {made} tokens in {ran.counters.steps} steps, {runner.num_graphs} graphs"
    if not machine.is_gpu:
        return Result("job", "tiny llama", is_right, words)
    floor_s = job.floor_s(peak_of(machine.device))
    few = _requests(job, job.seats // 4, job.output_len)
    graphs = run_engine(runner, few, seats=job.seats)
    del runner
    torch.cuda.empty_cache()
    runner = TorchRunner.lay_out(
        model, replace(options, kv_cache_memory=16 << 30, enforce_eager=True), eos_token_ids=()
    )
    eager = run_engine(runner, few, seats=job.seats)
    numbers = {
        "s": ran.seconds,
        "floor_s": floor_s,
        "output_tokens_per_s": made / ran.seconds,
        "computed_tokens_per_s": ran.counters.computed_tokens / ran.seconds,
        "steps": float(ran.counters.steps),
        "warm_up_s": warm.seconds,
        "few_rows_s": graphs.seconds,
        "few_rows_without_graphs_s": eager.seconds,
        "peak_bytes": float(torch.cuda.max_memory_allocated(machine.device)),
    }
    words += f", {len(few)} rows without graphs {eager.seconds / graphs.seconds:.2f}x as long"
    words += f", {made / ran.seconds:,.0f} tok/s, {ran.seconds:.1f} s, {ran.seconds / floor_s:.2f}x the floor"
    return Result("job", "llama 8B", is_right and model.attention.name == "triton", words, numbers)


def _module(job: _Job, dtype: torch.dtype, device: torch.device) -> Any:
    """Random weights, made where they are used; nothing is downloaded."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    build: Any = AutoModelForCausalLM.from_config
    config = LlamaConfig(
        vocab_size=job.vocab,
        hidden_size=job.hidden,
        intermediate_size=job.inner,
        num_hidden_layers=job.layers,
        num_attention_heads=job.heads,
        num_key_value_heads=job.kv_heads,
        max_position_embeddings=8192,
    )
    torch.manual_seed(0)
    with device:
        return build(config, attn_implementation="eager", dtype=dtype)


def _requests(job: _Job, num: int, num_new: int, *, first: int = 0) -> list[Request]:
    """Nothing shared."""
    ids = np.random.default_rng(first).integers(3, job.vocab, (num, job.prompt_len)).astype(np.int32)
    sampling = SamplingParams(max_tokens=num_new, ignore_eos=True)
    return [Request(first + row, one, sampling) for row, one in enumerate(ids)]


PART = Part("job", "an 8B-shaped Llama, end to end", 140, plan, run)
