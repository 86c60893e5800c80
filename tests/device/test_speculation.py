"""A real model says the same with guesses and without, greedy or sampled, with penalties or not: to the token."""

import numpy as np
import pytest

from batchrun.engine.engine import Engine
from batchrun.engine.model import Model
from batchrun.engine.request import Request, SamplingParams
from batchrun.engine.runner import TorchRunner
from batchrun.engine.runner_options import RunnerOptions
from batchrun.engine.scheduler import SchedulerConfig
from batchrun.engine.statistics import Counters
from batchrun_kernels import native
from tests.device.tiny_families import WIDE, make_model

SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=60),
    "sampled": SamplingParams(max_tokens=60, temperature=0.05, top_p=0.9, seed=3),
    "penalties": SamplingParams(max_tokens=60, frequency_penalty=0.01, repetition_penalty=1.01, min_tokens=9),
}


def run(model: Model, requests: list[Request], num_free_tokens: int) -> tuple[dict[int, tuple[int, ...]], Counters]:
    block_bytes = sum(layer.block_bytes(4, model.place.dtype) for layer in model.kv_layers.values())
    runner = TorchRunner.lay_out(model, RunnerOptions(block_size=4, kv_cache_memory=90 * block_bytes), ())
    config = SchedulerConfig(
        runner.num_blocks,
        runner.num_host_slots,
        4,
        block_bytes,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        eos_token_ids=frozenset(),
        num_free_tokens=num_free_tokens,
    )
    engine = Engine(config, runner, str)
    for request in requests:
        engine.add(request)
    texts = {}
    while engine.has_work:
        texts.update({completion.row_idx: completion.token_ids for completion in engine.step()})
        engine.check()
    return texts, engine.statistics().counters


@pytest.mark.skipif(native.find() is None, reason="needs the C kernels, whose rows do not depend on the batch")
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_guesses_do_not_change_a_token(family: str, sampling: str) -> None:
    model = Model.adopt(make_model(family, **WIDE))
    prompts = [np.array([5, 6, 7, 8, row] * 4, np.int32) for row in range(9, 15)]
    requests = [Request(row, prompt, SAMPLINGS[sampling]) for row, prompt in enumerate(prompts)]
    plain, _ = run(model, requests, 0)
    guessed, counters = run(model, requests, 16)
    assert guessed == plain
    assert counters.drafted_tokens > 0
    if sampling == "greedy":
        assert counters.accepted_tokens > 0
