"""What a row's logits depend on: with the C kernels nothing but its tokens, to the bit, whatever an engine does."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from batchrun.engine import invariance
from batchrun.engine.batch import ForwardBatch
from batchrun.engine.engine import Engine
from batchrun.engine.fused import FusedLinear
from batchrun.engine.invariance import require_fixed_kernels
from batchrun.engine.kv_cache import KVCache
from batchrun.engine.model import Model
from batchrun.engine.request import Request, SamplingParams
from batchrun.engine.runner import TorchRunner
from batchrun.engine.runner_options import RunnerOptions
from batchrun.engine.scheduler import SchedulerConfig
from batchrun.engine.statistics import Counters
from batchrun.engine.step import ScheduledBatch
from batchrun.errors import ModelUnavailable
from batchrun_kernels import native
from tests.device.tiny_families import VOCAB, WIDE, make_model

needs_library = pytest.mark.skipif(native.find() is None, reason="needs the C kernels: a C compiler at installation")
BLOCK, NUM_ROWS, NUM_NEW = 4, 14, 24

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma2": {},
    "llama in int8": {"quantization": "int8"},
    "gemma2 over float16": {"kv_dtype": torch.float16},
}
# How else the same rows are run; the counters that must then have counted something.
WAYS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "all at once": ({"max_num_seqs": 64, "max_num_batched_tokens": 4096}, ("cached_tokens",)),
    "few at a time": ({"max_num_seqs": 3, "max_num_batched_tokens": 4096}, ()),
    "cut into pieces": ({"max_num_batched_tokens": 7}, ()),
    "cut elsewhere": ({"max_num_batched_tokens": 23, "chunk_alignment_tokens": 5}, ()),
    "in the other order": ({"is_reversed": True}, ()),
    "without shared prefixes": ({"shares_prefixes": False}, ()),
    "behind shared prefixes": ({"max_num_seqs": 5}, ("cached_tokens",)),
    "with drafts": ({"num_free_tokens": 16, "max_num_seqs": 4}, ("drafted_tokens",)),
    "swapped": ({"num_blocks": 40, "preemption": "swap"}, ("swap_preemptions",)),
    "computed again": ({"num_blocks": 40, "preemption": "recompute"}, ("recompute_preemptions",)),
    "whole prompts first": ({"schedule": "prefill-first"}, ()),
    "a static batch": ({"schedule": "static", "max_num_seqs": 6}, ()),
    "resumed": ({"num_resumed": 11}, ()),
}


class Probe:
    """The bits of the logits behind every context that any run has come by; the same context must have the same."""

    def __init__(self) -> None:
        self.logits: dict[bytes, Tensor] = {}
        self.num_again = 0

    def listen(self, runner: TorchRunner) -> None:
        original = runner._logits

        def listened(batch: ScheduledBatch) -> Tensor:
            logits = original(batch)
            for choice, row in zip(batch.sampled, logits, strict=True):
                first = self.logits.setdefault(choice.context.tobytes(), row.clone())
                assert torch.equal(first, row), f"{choice.end} tokens of row {choice.sequence.request.row_idx}"
                self.num_again += first is not row
            return logits

        runner._logits = listened  # type: ignore[method-assign]


def make_requests() -> list[Request]:
    """Groups of rows behind a prefix that ends within a block, some greedy and some sampled; in plan order."""
    random = np.random.default_rng(0)
    stems = [random.integers(3, VOCAB, length, dtype=np.int32) for length in (0, 21, 66)]
    requests = []
    for row in range(NUM_ROWS):
        stem = stems[row * len(stems) // NUM_ROWS]
        own = np.tile(random.integers(3, VOCAB, 1 + row % 9, dtype=np.int32), 2)
        # Rows that end early let more in than there is room for.
        sampling = SamplingParams(max_tokens=NUM_NEW if row % 2 else 3)
        if row % 3 == 2:
            sampling = replace(sampling, temperature=0.4, top_p=0.9, repetition_penalty=1.05, seed=5)
        requests.append(Request(row, np.concatenate([stem, own]), sampling, keep_len=len(stem)))
    return requests


def run(model: Model, probe: Probe, requests: list[Request], **options: Any) -> tuple[dict[int, list[int]], Counters]:
    block_bytes = sum(layer.block_bytes(BLOCK, model.kv_place.dtype) for layer in model.kv_layers.values())
    memory = options.pop("num_blocks", 600) * block_bytes
    runner = TorchRunner.lay_out(
        model, RunnerOptions(block_size=BLOCK, kv_cache_memory=memory, swap_space=memory), eos_token_ids=()
    )
    probe.listen(runner)
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "eos_token_ids": frozenset()} | options
    engine = Engine(
        SchedulerConfig(runner.num_blocks, runner.num_host_slots, BLOCK, block_bytes, **settings), runner, str
    )
    for request in requests:
        engine.add(request)
    texts = {}
    while engine.has_work:
        texts.update({completion.row_idx: list(completion.token_ids) for completion in engine.step()})
    return texts, engine.statistics().counters


@needs_library
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_tokens_depend_on_the_row_alone(name: str) -> None:
    """Alone first; then in every way an engine can come to the same context."""
    model = Model.adopt(make_model(name.split()[0], **WIDE), **MODELS[name])
    probe, requests = Probe(), make_requests()
    alone: dict[int, list[int]] = {}
    for request in requests:
        alone.update(run(model, probe, [request], max_num_seqs=1, max_num_batched_tokens=4096)[0])
    for way, (options, counted) in WAYS.items():
        options, rows = dict(options), requests
        if options.pop("is_reversed", False):
            rows = requests[::-1]
        if num_resumed := options.pop("num_resumed", 0):
            rows = [replace(one, output_ids=tuple(alone[one.row_idx][:-1][:num_resumed])) for one in requests]
        before = probe.num_again
        texts, counters = run(model, probe, rows, **options)
        assert texts == alone, way
        assert probe.num_again > before, way
        assert all(getattr(counters, counter) for counter in counted), (way, counters)


@needs_library
@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "smollm3"])
def test_a_model_in_c_is_proven(family: str, kv_dtype: torch.dtype, quantization: Any) -> None:
    Model.adopt(make_model(family, **WIDE), kv_dtype, quantization, is_deterministic=True)


@needs_library
@pytest.mark.parametrize(
    ("family", "options", "named"),
    [("mixtral", WIDE, "_grouped_mm"), ("gpt2", WIDE, "layer_norm"), ("llama", {}, "scaled_dot_product_attention")],
)
def test_a_model_that_torch_computes_in_part_is_refused_by_what_it_computes(
    family: str, options: dict[str, Any], named: str
) -> None:
    """The last one's heads of 6 are not for the attention in C."""
    module = make_model(family, **options)
    with pytest.raises(ModelUnavailable, match=f"^{type(module).__name__} leaves .*{named}.* to torch"):
        Model.adopt(module, is_deterministic=True)


@needs_library
def test_a_kernel_that_looks_at_the_rows_beside_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    original = FusedLinear.forward
    monkeypatch.setattr(FusedLinear, "forward", lambda self, x: original(self, x) + 1e-4 * (x.numel() // x.shape[-1]))
    with pytest.raises(ModelUnavailable, match="other logits beside other rows"):
        Model.adopt(make_model("llama", **WIDE), is_deterministic=True)


@needs_library
def test_a_kernel_that_spoils_rows_over_shared_blocks_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that share their first tiles are read together, and the proof must come by that."""
    original, num_sharing = invariance.run_packed, []

    def spoiled(module: Any, batch: ForwardBatch, cache: KVCache, plan: Any) -> Tensor:
        logits, decoding = original(module, batch, cache, plan), np.array(batch.work.q_lens) == 1
        if not decoding.any():
            return logits
        tiles = np.unique(batch.work.block_table.numpy()[decoding, :4], axis=0, return_counts=True)[1]
        num_sharing.append(max(tiles))
        return logits + 1e-4 * (num_sharing[-1] > 1)

    monkeypatch.setattr(invariance, "run_packed", spoiled)
    with pytest.raises(ModelUnavailable, match="other logits beside other rows"):
        Model.adopt(make_model("llama", **WIDE), is_deterministic=True)
    # Of so many, whatever the heads, two at least are read together by every one of two threads.
    assert max(num_sharing) >= 4 * torch.get_num_threads()


@pytest.mark.parametrize(
    ("device", "dtype", "message"),
    [
        ("cuda", torch.float32, "--deterministic is for a CPU: on cuda .*; use --device cpu"),
        ("cpu", torch.bfloat16, "--deterministic needs --dtype float32, not bfloat16"),
    ],
)
def test_where_no_model_could_be_proven_none_is_loaded(device: str, dtype: torch.dtype, message: str) -> None:
    with pytest.raises(ModelUnavailable, match=message):
        require_fixed_kernels(torch.device(device), dtype)


def test_without_the_c_kernels_it_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "problem", lambda: "the C kernels were not built; install a C compiler")
    with pytest.raises(ModelUnavailable, match="needs the C kernels, but the C kernels were not built; install a C"):
        require_fixed_kernels(torch.device("cpu"), torch.float32)
