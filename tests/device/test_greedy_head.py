"""Likeliest tokens without logits are those of the logits, and only a head that is one product finds them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from batchrun.engine.batch import ForwardBatch, pack
from batchrun.engine.kv_cache import KVCache
from batchrun.engine.model import Model
from batchrun.engine.request import SamplingParams
from batchrun.engine.runner import TorchRunner
from batchrun.engine.runner_options import RunnerOptions
from batchrun.engine.sampling import takes_likeliest
from batchrun.engine.step import NO_TOKEN, Item, ScheduledBatch
from batchrun_kernels import native
from tests.device.family_matrix import BLOCK, make_prompts, make_rows, run_engine
from tests.device.steps import Blocks, make_sequence
from tests.device.tiny_families import make_model

pytestmark = [
    pytest.mark.skipif(native.find() is None, reason="needs the C kernels: a C compiler at installation"),
    pytest.mark.usefixtures("two_threads"),
]

# By whether the logits are what the head's weight gives: not where they are capped, scaled or have a bias.
FAMILIES = {"llama": True, "qwen3": True, "mixtral": True, "gemma2": False, "cohere": False, "phi": False}


def a_step(model: Model) -> tuple[ForwardBatch, KVCache]:
    """Whole prompts, of which one token, all tokens and none are read."""
    blocks, prompts = Blocks(num_blocks=40), make_prompts()
    sequences = [make_sequence(row, ids, blocks.take(9)) for row, ids in enumerate(prompts)]
    items = tuple(Item(one, 0, len(ids), samples=True) for one, ids in zip(sequences, prompts, strict=True))
    batch = pack(ScheduledBatch(items), BLOCK, torch.device("cpu"))
    first, second = len(prompts[0]), len(prompts[1])
    return replace(batch, sampled=torch.arange(first - 1, first + second)), model.make_cache(40, BLOCK, 0)


@torch.inference_mode()
@pytest.mark.parametrize("family", [name for name, is_product in FAMILIES.items() if is_product])
def test_the_likeliest_tokens_are_those_of_the_logits(family: str) -> None:
    model = Model.adopt(make_model(family))
    batch, cache = a_step(model)
    largest, tokens = model.likeliest(batch, cache)
    assert all(map(torch.equal, (largest, tokens), model.forward(batch, cache).max(dim=-1)))


@pytest.mark.parametrize("family", FAMILIES)
def test_only_a_head_that_is_one_product_has_them(family: str) -> None:
    assert (Model.adopt(make_model(family)).greedy_head is not None) == FAMILIES[family]


@pytest.mark.parametrize(
    "change", [lambda logits: logits * 0.5, lambda logits: logits.double(), lambda logits: logits.mul_(0.5)]
)
def test_a_head_whose_output_is_changed_has_none(change: Callable[[Tensor], Tensor]) -> None:
    module = make_model("llama")
    original = module.forward

    def changed(*args: Any, **named: Any) -> Any:
        output = original(*args, **named)
        output.logits = change(output.logits)
        return output

    module.forward = changed
    assert Model.adopt(module).greedy_head is None


def test_greedy_rows_have_the_same_tokens_without_it() -> None:
    """Through an engine of few blocks: chunks, shared prefixes, both ways of leaving."""
    model = Model.adopt(make_model("llama"))
    found, _ = run_engine(model, make_rows())
    model.greedy_head = None
    assert run_engine(model, make_rows())[0] == found


SAMPLINGS = {
    "greedy": SamplingParams(),
    "its end": SamplingParams(min_tokens=1, ignore_eos=True, stop_token_ids=(3,)),
    "heat": SamplingParams(temperature=0.5),
    "bias": SamplingParams(logit_bias=((3, -1.0),)),
    "a penalty": SamplingParams(frequency_penalty=0.1),
}


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_row_that_more_than_logits_decide_needs_them(name: str) -> None:
    item = Item(make_sequence(0, [1, 2, 3], [0], SAMPLINGS[name]), 0, 3, samples=True)
    assert takes_likeliest(item) == (name == "greedy")


def test_a_row_that_needs_logits_is_sampled_from_them_beside_greedy_ones() -> None:
    """The greedy row's token stays; the other one's bias wins."""
    model = Model.adopt(make_model("llama"))
    runner = TorchRunner.lay_out(model, RunnerOptions(block_size=BLOCK, kv_cache_memory=1 << 20), eos_token_ids=())
    chosen = []
    for biased in (SamplingParams(), SamplingParams(logit_bias=((7, 1e6),))):
        blocks = Blocks(runner.num_blocks)
        rows = [
            make_sequence(row, [5, 6, 7], blocks.take(1), one) for row, one in enumerate((SamplingParams(), biased))
        ]
        batch = ScheduledBatch(tuple(Item(row, 0, 3, samples=True) for row in rows))
        chosen.append(runner.launch(batch).wait().tokens.tolist())
    assert chosen[0][0] == chosen[0][1] == chosen[1][0] != 7
    assert chosen[1][1] == 7


def test_what_is_not_finite_is_no_token() -> None:
    module = make_model("llama")
    runner = TorchRunner.lay_out(
        Model.adopt(module), RunnerOptions(block_size=BLOCK, kv_cache_memory=1 << 20), eos_token_ids=()
    )
    module.model.norm.weight.data.fill_(torch.nan)
    batch = ScheduledBatch((Item(make_sequence(0, [5, 6, 7], [0]), 0, 3, samples=True),))
    assert runner.launch(batch).wait().tokens.tolist() == [NO_TOKEN]
