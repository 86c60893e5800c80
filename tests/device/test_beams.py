"""Searches with beams on a tiny model: the tokens are those of `transformers.generate(num_beams=…)`."""

import random
from typing import Any, get_args

import numpy as np
import pytest
import torch

from batchrun.engine.engine import Engine
from batchrun.engine.model import Model
from batchrun.engine.request import BeamSearch, EarlyStoppingName, Request, SamplingParams
from batchrun.engine.runner import TorchRunner
from batchrun.engine.runner_options import RunnerOptions
from batchrun.engine.scheduler import SchedulerConfig
from batchrun_kernels import native
from tests.device.test_loop import Hungry, altered
from tests.device.tiny_families import VOCAB, WIDE, make_model

EOS, NUM_TOKENS, NUM_ROWS, BLOCK_SIZE = 2, 14, 8, 4
ENDS = [EOS, *range(3, 9)]
ENDING = SamplingParams(max_tokens=NUM_TOKENS, stop_token_ids=tuple(ENDS[1:]))


@pytest.fixture(scope="module")
def module() -> Any:
    return make_model("llama", **WIDE)


@pytest.fixture(scope="module")
def model() -> Model:
    """The same weights."""
    return Model.adopt(make_model("llama", **WIDE))


def prompts() -> list[list[int]]:
    rng = random.Random(3)
    return sorted([5, 6, 7, *(rng.randint(3, VOCAB - 1) for _ in range(rng.randint(1, 20)))] for _ in range(NUM_ROWS))


def requests(search: BeamSearch, sampling: SamplingParams) -> list[Request]:
    return [
        Request(row, np.array(ids, np.int32), sampling, num_logprobs=search.num_candidates, beams=search)
        for row, ids in enumerate(prompts())
    ]


def run(model: Model, rows: list[Request], num_blocks: int = 300, **options: Any) -> dict[int, list[int]]:
    block_bytes = sum(layer.block_bytes(BLOCK_SIZE, model.place.dtype) for layer in model.kv_layers.values())
    layout = RunnerOptions(block_size=BLOCK_SIZE, kv_cache_memory=num_blocks * block_bytes)
    runner = TorchRunner.lay_out(model, layout, (EOS,))
    settings = {"max_num_seqs": 40, "max_num_batched_tokens": 32, "eos_token_ids": frozenset({EOS})} | options
    engine = Engine(
        SchedulerConfig(runner.num_blocks, runner.num_host_slots, BLOCK_SIZE, block_bytes, **settings), runner, str
    )
    engine.scheduler.lengths.expected = lambda sampling, output_len: output_len + 1
    for request in rows:
        engine.add(request)
    done = {}
    while engine.has_work:
        done.update({completion.row_idx: list(completion.token_ids) for completion in engine.step()})
        engine.check()
    return done


def generated(module: Any, ids: list[int], search: BeamSearch, ends: list[int]) -> list[int]:
    early = {"true": True, "false": False}.get(search.early_stopping, search.early_stopping)
    with torch.inference_mode():
        out = module.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            max_new_tokens=NUM_TOKENS,
            num_beams=search.num_beams,
            length_penalty=search.length_penalty,
            early_stopping=early,
            do_sample=False,
            eos_token_id=ends or None,
            pad_token_id=0,
        )
    tokens: list[int] = out[0, len(ids) :].tolist()
    # What is shorter than others of the search is padded.
    last = next((at for at, token in enumerate(tokens) if token in ends), len(tokens) - 1)
    return tokens[: last + 1]


@pytest.mark.parametrize("early_stopping", get_args(EarlyStoppingName))
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 3.0])
@pytest.mark.parametrize("num_beams", [2, 5])
def test_the_tokens_are_those_of_transformers(
    module: Any, model: Model, num_beams: int, length_penalty: float, early_stopping: EarlyStoppingName
) -> None:
    search = BeamSearch(num_beams, (1 + len(ENDS)) * num_beams, length_penalty, early_stopping)
    found = run(model, requests(search, ENDING))
    assert found == {row: generated(module, ids, search, ENDS) for row, ids in enumerate(prompts())}


def test_the_options_change_what_is_found(model: Model) -> None:
    """Longer texts with a higher penalty, and other ones when a search ends early."""

    def found(length_penalty: float, early_stopping: EarlyStoppingName = "false") -> list[list[int]]:
        search = BeamSearch(5, (1 + len(ENDS)) * 5, length_penalty, early_stopping)
        return [*run(model, requests(search, ENDING)).values()]

    shortest, middle, longest = (sum(map(len, found(penalty))) for penalty in (-1.0, 1.0, 3.0))
    assert shortest < middle < longest
    assert found(3.0, "true") != found(3.0, "false")


def test_the_tokens_are_those_of_transformers_where_nothing_ends_a_text(module: Any, model: Model) -> None:
    search = BeamSearch(3, 6)
    found = run(model, requests(search, SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)))
    assert found == {row: generated(module, ids, search, []) for row, ids in enumerate(prompts())}


def test_a_step_that_is_computed_in_halves_says_as_much_of_each(model: Model) -> None:
    """Rows that more tokens may end ask for more likely ones, and the halves of a step may have none of them."""
    few, many = BeamSearch(2, 4), BeamSearch(2, 10)
    ending = SamplingParams(max_tokens=NUM_TOKENS, stop_token_ids=(5, 6, 7, 8))
    rows = [
        requests(few, SamplingParams(max_tokens=NUM_TOKENS))[row] if row % 2 else requests(many, ending)[row]
        for row in range(NUM_ROWS)
    ]
    assert run(altered(model, Hungry(model._module, 9)), rows, max_num_batched_tokens=64) == run(model, rows)


@pytest.mark.skipif(native.find() is None, reason="needs the C kernels, whose rows do not depend on the batch")
@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 5, "max_num_batched_tokens": 3},
        {"shares_prefixes": False},
        {"schedule": "fcfs"},
        {"schedule": "prefill-first", "max_num_batched_tokens": 7},
        {"num_blocks": 30, "schedule": "chunked"},
        {"num_free_tokens": 16},
    ],
    ids=str,
)
def test_nothing_beside_a_row_changes_its_tokens(model: Model, options: dict[str, Any]) -> None:
    """What --deterministic promises: also in a pool for one row at its longest, where the others have to leave."""
    search = BeamSearch(4, 8, 1.5)
    rows = requests(search, SamplingParams(max_tokens=NUM_TOKENS))
    alone = {row.row_idx: run(model, [row])[row.row_idx] for row in rows}
    assert run(model, rows, **options) == alone
    assert run(model, rows[::-1], **options) == alone
