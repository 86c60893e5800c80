"""The engine on the GPU: families pass their self-check in Triton; greedy rows are transformers', preempted or not."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from batchrun.engine.engine import Engine
from batchrun.engine.model import Model
from batchrun.engine.preemption import Preemption
from batchrun.engine.request import Request, SamplingParams
from batchrun.engine.runner import TorchRunner
from batchrun.engine.runner_options import RunnerOptions
from batchrun.engine.scheduler import SchedulerConfig
from batchrun.engine.self_check import check, expect
from batchrun.engine.statistics import Counters
from batchrun.quiet import quiet_transformers
from batchrun_kernels.triton.attention import TritonAttention
from tests.device.tiny_families import make_model
from tests.gpu.part import Machine, Part, Result, attempt

# A llama whose heads have tiles of their own; scores large enough that no two tokens are nearly tied.
_LLAMA: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "initializer_range": 0.2,
}
# Each asks its attention for something else, or its experts: plain, sinks, softcap, windows, no rotation, experts.
_FAMILIES = ("llama", "gpt_oss", "gemma2", "mistral", "gemma3_text", "gpt2", "qwen3_moe", "mixtral", "phi3", "olmo2")
# Rows of whole 16 bytes, which products of several experts' halves want.
_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
    "head_dim": 16,
}
_BLOCK, _ROOMY = 16, 400


@dataclass(frozen=True, slots=True)
class _Rows:
    """Prompts of 41 to 63 tokens; in the pool of `tight` blocks some are preempted."""

    num: int
    num_new: int
    tight: int
    preemptions: tuple[Preemption, ...]


_ROWS = _Rows(20, 24, 40, ("swap", "recompute"))
_FEW_ROWS = _Rows(3, 10, 9, ("swap",))


@dataclass(frozen=True, slots=True)
class Ran:
    tokens: dict[int, list[int]]  # by row
    counters: Counters
    seconds: float


def run_engine(runner: TorchRunner, requests: list[Request], *, preemption: Preemption = "auto", seats: int) -> Ran:
    """All requests to their end; no token ends a row early."""
    config = SchedulerConfig(
        num_blocks=runner.num_blocks,
        num_host_slots=runner.num_host_slots,
        block_size=runner.block_size,
        block_bytes=runner.block_bytes,
        max_num_seqs=seats,
        max_num_batched_tokens=8192,
        eos_token_ids=frozenset(),
        preemption=preemption,
    )
    engine = Engine(config, runner, decode=lambda ids: "")
    for request in requests:
        engine.add(request)
    began = time.perf_counter()
    tokens: dict[int, list[int]] = {}
    while engine.has_work:
        for done in engine.step():
            tokens[done.row_idx] = list(done.token_ids)
    return Ran(tokens, engine.statistics().counters, time.perf_counter() - began)


def plan() -> Iterator[str]:
    yield f"adopt tiny models of {len(_FAMILIES)} families in float32 and bfloat16: the self-check runs in Triton"
    yield f"{_ROWS.num} rows of a tiny Llama with {_ROWS.num_new} greedy tokens each: those of transformers"
    yield f"the same from a pool of {_ROWS.tight} blocks, preempted by swapping, then by recomputing: the same tokens"


def run(machine: Machine) -> Iterator[Result]:
    yield attempt("engine", "llama", lambda: _rows(machine))
    dtypes = (torch.float32, torch.bfloat16) if machine.is_gpu else (torch.float32,)
    for family in _FAMILIES if machine.is_gpu else _FAMILIES[:2]:
        for dtype in dtypes:
            name = f"{family} {str(dtype).removeprefix('torch.')}"
            yield attempt("engine", name, lambda one=family, of=dtype, named=name: _adopt(one, of, named, machine))  # type: ignore[misc]


def _adopt(family: str, dtype: torch.dtype, name: str, machine: Machine) -> Result:
    with quiet_transformers():
        module = make_model(family, **_SIZES).to(machine.device, dtype)
    expected = expect(module)
    model = Model.adopt(module)
    if not machine.is_gpu:
        check(module, expected, TritonAttention(machine.device))
        return Result("engine", name, True, "its self-check passes with Triton's interpreter")
    is_right = model.attention.name == "triton"
    return Result("engine", name, is_right, f"its self-check passes with {model.attention.name} attention")


@torch.inference_mode()
def _rows(machine: Machine) -> Result:
    module = make_model("llama", seed=5, **_LLAMA).to(machine.device)
    rows = _ROWS if machine.is_gpu else _FEW_ROWS
    requests = _requests(rows.num, rows.num_new)
    expected = {one.row_idx: _alone(module, one.token_ids, one.sampling.max_tokens) for one in requests}
    model = Model.adopt(module)
    if not machine.is_gpu:
        # Never chosen for a CPU: it is interpreted there.
        model.attention = TritonAttention(machine.device)
    block_bytes = sum(layer.block_bytes(_BLOCK, torch.float32) for layer in model.kv_layers.values())
    wrong, said = [], [f"{model.attention.name} attention"]
    runs: list[tuple[Preemption, int]] = [("auto", _ROOMY), *((way, rows.tight) for way in rows.preemptions)]
    for preemption, num_blocks in runs:
        room = num_blocks * block_bytes
        options = RunnerOptions(block_size=_BLOCK, kv_cache_memory=room, swap_space=room)
        runner = TorchRunner.lay_out(model, options, eos_token_ids=())
        ran = run_engine(runner, requests, preemption=preemption, seats=32)
        unequal = [row for row, tokens in expected.items() if ran.tokens.get(row) != tokens]
        counters = ran.counters
        outcome = f"{counters.preemptions} preempted, {runner.num_graphs} graphs, {len(unequal)} rows differ"
        said.append(f"{preemption} in {num_blocks} blocks: {outcome}")
        if unequal or (preemption != "auto" and not counters.preemptions) or machine.is_gpu > runner.num_graphs:
            wrong.append(preemption)
    if model.attention.name != "triton":
        wrong.append("attention")
    return Result("engine", "llama", not wrong, "; ".join(said))


def _requests(num: int, num_new: int) -> list[Request]:
    """Two prefixes, each shared by half of the rows; as lengths are not known before, the pool is overcommitted."""
    random = np.random.default_rng(0)
    prefixes = random.integers(3, 67, (2, 40))
    requests = []
    for row in range(num):
        ids = np.concatenate([prefixes[2 * row // num], random.integers(3, 67, 1 + 7 * row % 23)])
        requests.append(Request(row, ids.astype(np.int32), SamplingParams(max_tokens=num_new)))
    return requests


def _alone(module: Any, ids: NDArray[np.int32], num_new: int) -> list[int]:
    grown = ids.tolist()
    for _ in range(num_new):
        logits = module(input_ids=torch.tensor([grown], device=module.device), use_cache=False).logits
        grown.append(int(logits[0, -1].argmax()))
    return list(grown[len(ids) :])


PART = Part("engine", "models, rows and preemption through the engine", 110, plan, run)
