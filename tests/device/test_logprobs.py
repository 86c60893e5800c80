"""Log-probabilities are the model's own, whatever was done to its logits and however the row came by its tokens."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from batchrun.engine.engine import Engine
from batchrun.engine.logprobs import logprobs_of
from batchrun.engine.model import Model
from batchrun.engine.request import Completion, Request, SamplingParams
from batchrun.engine.runner import TorchRunner
from batchrun.engine.runner_options import RunnerOptions
from batchrun.engine.scheduler import SchedulerConfig
from batchrun.engine.statistics import Counters
from batchrun.engine.step import NO_TOKEN
from tests.device.tiny_families import VOCAB, make_model

SAMPLING = SamplingParams(
    max_tokens=20, temperature=1.3, top_k=30, repetition_penalty=1.4, presence_penalty=0.5, seed=3
)


def run(requests: list[Request], num_blocks: int, **options: object) -> tuple[dict[int, Completion], Counters]:
    model = Model.adopt(make_model("llama", seed=5, head_dim=8))
    block_bytes = sum(layer.block_bytes(4, model.place.dtype) for layer in model.kv_layers.values())
    runner = TorchRunner.lay_out(model, RunnerOptions(block_size=4, kv_cache_memory=num_blocks * block_bytes), ())
    settings = {"max_num_seqs": 5, "max_num_batched_tokens": 16, "eos_token_ids": frozenset({2})} | options
    engine = Engine(SchedulerConfig(runner.num_blocks, runner.num_host_slots, 4, block_bytes, **settings), runner, str)
    for request in requests:
        engine.add(request)
    found = {}
    while engine.has_work:
        found |= {done.row_idx: done for done in engine.step()}
        engine.check()
    return found, engine.statistics().counters


@torch.inference_mode()
def expected(prompt: NDArray[np.int32], output: tuple[int, ...]) -> torch.Tensor:
    """Transformers' own, of every token at each place of the output: float64 [num_tokens, vocab]."""
    module = make_model("llama", seed=5, head_dim=8)
    ids = torch.tensor([[*prompt.tolist(), *output]])
    logits = module(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return torch.as_tensor(logits.double().log_softmax(dim=-1))


def requests() -> list[Request]:
    random = np.random.default_rng(1)
    prompts = [random.integers(3, VOCAB, int(length)).astype(np.int32) for length in random.integers(1, 30, 9)]
    return [
        Request(row, ids, SAMPLING if row % 3 else replace(SAMPLING, temperature=0), num_logprobs=4)
        for row, ids in enumerate(prompts)
    ]


@pytest.mark.parametrize(
    ("num_blocks", "options"),
    [(300, {}), (20, {"preemption": "recompute"}), (20, {"preemption": "swap"}), (300, {"num_free_tokens": 16})],
    ids=["roomy", "recomputed", "swapped", "drafts"],
)
def test_they_are_those_of_transformers(num_blocks: int, options: dict[str, object]) -> None:
    rows = requests()
    if "num_free_tokens" in options:
        # What repeats itself can be guessed.
        rows = [
            replace(row, token_ids=np.tile(row.token_ids[:5], 4), sampling=SamplingParams(max_tokens=60))
            for row in rows
        ]
    found, counters = run(rows, num_blocks, **options)
    assert (counters.preemptions > 0) == ("preemption" in options)
    assert (counters.drafted_tokens > 0) == ("num_free_tokens" in options)
    for request in rows:
        done = found[request.row_idx]
        every = expected(request.token_ids, done.token_ids)
        assert len(done.logprobs) == len(done.token_ids) > 0
        for token, one, scores in zip(done.token_ids, done.logprobs, every, strict=True):
            # Float32 sums in another order.
            assert one.logprob == pytest.approx(float(scores[token]), abs=1e-4)
            assert one.rank == int((scores >= scores[token]).sum())
            best = scores.topk(4)
            assert one.top_ids == tuple(best.indices.tolist())
            np.testing.assert_allclose(one.top, best.values, atol=1e-4)
    assert any(one.rank > 4 for done in found.values() for one in done.logprobs) or counters.accepted_tokens > 0


def test_none_are_kept_of_rows_that_ask_for_none() -> None:
    found, _ = run([replace(request, num_logprobs=None) for request in requests()], 300)
    assert {done.logprobs for done in found.values()} == {()}


def test_no_likeliest_tokens_leave_the_chosen_one() -> None:
    found, _ = run([replace(request, num_logprobs=0) for request in requests()], 300)
    assert {(one.top_ids, one.top) for done in found.values() for one in done.logprobs} == {((), ())}


def test_a_row_says_the_same_alone_and_beside_others() -> None:
    logits = torch.randn(9, 1201, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([*range(8), NO_TOKEN])
    together = logprobs_of(logits, tokens, 3).listed()
    alone = [logprobs_of(logits[row : row + 1], tokens[row : row + 1], 3).listed()[0] for row in range(9)]
    assert list(together) == alone


def test_a_step_that_samples_nothing_has_none() -> None:
    assert logprobs_of(torch.zeros(0, VOCAB), torch.zeros(0, dtype=torch.int64), 3).listed() == ()
