"""Keys and values of real layers handed over from one pool to another, through memory that both runners have mapped."""

import os
import random
from dataclasses import replace

import numpy as np
import pytest

from batchrun.engine.disaggregated import DisaggregatedEngine
from batchrun.engine.host_memory import anonymous
from batchrun.engine.model import Model
from batchrun.engine.prefill_engine import PrefillEngine
from batchrun.engine.request import Request, SamplingParams
from batchrun.engine.runner import TorchRunner
from batchrun.engine.runner_options import RunnerOptions
from batchrun.engine.scheduler import SchedulerConfig
from tests.device.family_matrix import BLOCK, NUM_BLOCKS, NUM_NEW, NUM_SEQS, make_rows, poison, run_engine
from tests.device.tiny_families import make_model
from tests.engine.test_disaggregated import InTurns, run


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral", "deepseek_v3"])
def test_tokens_are_those_of_one_engine(family: str, seed: int) -> None:
    """Pools are too small for all rows, and host slots for all that are computed ahead."""
    model, rows = Model.adopt(make_model(family)), make_rows()
    expected, _ = run_engine(model, rows)
    block_bytes = sum(layer.block_bytes(BLOCK, model.place.dtype) for layer in model.kv_layers.values())
    descriptor = anonymous(25 * block_bytes)
    options = RunnerOptions(
        block_size=BLOCK,
        max_num_seqs=NUM_SEQS,
        kv_cache_memory=NUM_BLOCKS * block_bytes,
        swap_space=25 * block_bytes,
        swap_descriptor=descriptor,
    )
    decoding, prefilling = (TorchRunner.lay_out(model, options, eos_token_ids=()) for _ in range(2))
    os.close(descriptor)
    for runner in (decoding, prefilling):
        poison(runner._shard.cache)
    config = SchedulerConfig(
        NUM_BLOCKS, 25, BLOCK, block_bytes, NUM_SEQS, max_num_batched_tokens=19, eos_token_ids=frozenset()
    )
    prefiller = InTurns(PrefillEngine(replace(config, max_num_batched_tokens=7), prefilling), random.Random(seed))
    engine = DisaggregatedEngine(config, decoding, str, prefiller)
    sampling = SamplingParams(max_tokens=NUM_NEW)
    done = run(engine, [Request(row, np.array(ids, np.int32), sampling) for row, ids in enumerate(rows)])
    assert [list(done[row].token_ids) for row in range(len(rows))] == expected
    assert len(prefiller.ordered) == len(rows)
