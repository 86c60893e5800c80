"""What is done to logits before a token is chosen is what transformers does: greedy rows equal its `generate`."""

from typing import Any

import numpy as np
import pytest
import torch

from batchrun.engine.engine import Engine
from batchrun.engine.model import Model
from batchrun.engine.request import Request, SamplingParams
from batchrun.engine.runner import TorchRunner
from batchrun.engine.runner_options import RunnerOptions
from batchrun.engine.scheduler import SchedulerConfig
from tests.device.tiny_families import VOCAB, make_model

EOS, NUM_NEW = 2, 25


def prompts() -> list[list[int]]:
    random = np.random.default_rng(3)
    return [random.integers(3, VOCAB, int(length)).tolist() for length in random.integers(1, 30, 12)]


@torch.inference_mode()
def generated(**options: Any) -> list[list[int]]:
    module = make_model("llama", seed=5, head_dim=8)
    said = []
    for ids in prompts():
        given = torch.tensor([ids])
        grown = module.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=NUM_NEW, do_sample=False, **options
        )
        said.append(grown[0, len(ids) :].tolist())
    return said


def ours(bad_words: tuple[tuple[int, ...], ...] = (), **params: Any) -> list[list[int]]:
    model = Model.adopt(make_model("llama", seed=5, head_dim=8))
    runner = TorchRunner.lay_out(model, RunnerOptions(block_size=4, kv_cache_memory=1 << 20), (EOS,))
    config = SchedulerConfig(
        runner.num_blocks,
        0,
        4,
        runner.block_bytes,
        max_num_seqs=5,
        max_num_batched_tokens=16,
        eos_token_ids=frozenset({EOS}),
    )
    engine = Engine(config, runner, str)
    sampling = SamplingParams(max_tokens=NUM_NEW, **params)
    for row, ids in enumerate(prompts()):
        engine.add(Request(row, np.array(ids, np.int32), sampling, bad_words=bad_words))
    found = {}
    while engine.has_work:
        found |= {done.row_idx: list(done.token_ids) for done in engine.step()}
    return [found[row] for row in range(len(found))]


@pytest.mark.parametrize(
    ("theirs", "params"),
    [
        ({}, {}),
        ({"repetition_penalty": 1.7}, {"repetition_penalty": 1.7}),
        ({"sequence_bias": {(11,): 4.0, (30,): -9.0}}, {"logit_bias": ((11, 4.0), (30, -9.0))}),
        (
            {"sequence_bias": {(11,): 4.0}, "repetition_penalty": 1.4},
            {"logit_bias": ((11, 4.0),), "repetition_penalty": 1.4},
        ),
        (
            {"sequence_bias": {(EOS,): 3.0}, "min_new_tokens": 9},
            {"logit_bias": ((EOS, 3.0),), "min_tokens": 9},
        ),
    ],
    ids=["plain", "repetition_penalty", "bias", "bias-before-penalty", "min_tokens"],
)
def test_greedy_rows_equal_generate(theirs: dict[str, Any], params: dict[str, Any]) -> None:
    said = generated(**theirs)
    assert ours(**params) == said
    assert not theirs or said != generated()


def test_bad_words_equal_generate() -> None:
    """Words that the prompts do not end with a part of: there transformers, unlike vLLM, counts the prompt too."""
    plain = generated()
    words = tuple(dict.fromkeys(tuple(tokens[at : at + size]) for tokens in plain for at, size in ((2, 1), (5, 2))))
    words = tuple(
        word for word in words if EOS not in word and len(word) and all(ids[-1:] != [word[0]] for ids in prompts())
    )
    said = generated(bad_words_ids=[list(word) for word in words])
    assert ours(words) == said
    assert said != plain
