"""The floor's formula, counted out, and against what torch itself counts."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, LlamaForCausalLM

from batchrun_jobs.bench.floor import Decoder, Floor, Least, Rates, least, read_decoder
from tests.bench.conftest import workload
from tests.device.tiny_families import VOCAB, make_model

DECODER = Decoder(linear_weights=1000, head_weights=77, heads_width=13)


def counted_out(prompts: Sequence[Sequence[int]], lengths: Sequence[int], decoder: Decoder) -> Least:
    """Every token is named by all that it depends on; a set holds it once."""
    tokens: set[tuple[int, ...]] = set()
    sampled: set[tuple[int, ...]] = set()
    for prompt, length in zip(prompts, lengths, strict=True):
        tokens |= {tuple(prompt[: at + 1]) for at in range(len(prompt))}
        # The answer's tokens, of which nothing is known but that they follow from the prompt.
        whole = [*prompt, *((-1, *prompt, at) for at in range(length))]
        sampled |= {tuple(whole[: len(prompt) + at]) for at in range(length)}
        tokens |= {tuple(whole[: len(prompt) + at]) for at in range(1, length)}
    flops = 0
    for token in tokens:
        flops += 2 * decoder.linear_weights
        flops += sum(4 * decoder.heads_width for _ in token)
    flops += sum(2 * decoder.head_weights for _ in sampled)
    return Least(flops, 4 * (decoder.linear_weights + decoder.head_weights) * max(lengths))


@pytest.mark.parametrize(
    ("prompts", "lengths"),
    [
        ([[5]], [1]),
        ([[5, 6, 7], [5, 6, 8, 9], [5], [1, 2]], [3, 1, 4, 2]),
        # Equal prompts, of which the longer answer contains the other.
        ([[5, 6], [9], [5, 6], [5, 6]], [2, 1, 7, 3]),
        # One prompt is the beginning of another; 10 sorts behind 9.
        ([[1, 10, 3], [1, 9], [1, 10], [1, 10, 3, 3]], [1, 1, 1, 1]),
    ],
)
def test_the_formula_equals_what_is_counted_out(prompts: list[list[int]], lengths: list[int]) -> None:
    assert least(workload(prompts, lengths), DECODER) == counted_out(prompts, lengths, DECODER)


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    model: LlamaForCausalLM = make_model("llama")
    return model


def test_the_formula_equals_what_torch_counts_of_one_row(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    llama.save_pretrained(tmp_path)
    decoder = read_decoder(tmp_path)
    assert decoder is not None
    prompt, length = list(range(3, 14)), 5
    # Token by token nothing is computed that the mask then hides.
    counter, cache = FlopCounterMode(display=False), DynamicCache()
    with torch.inference_mode(), counter:
        for at, token in enumerate([*prompt, *range(length - 1)]):
            out = llama.model(input_ids=torch.tensor([[token]]), cache=cache, use_cache=True)
            if at >= len(prompt) - 1:
                llama.lm_head(out.last_hidden_state)
    counts: dict[str, Any] = counter.get_flop_counts()
    assert least(workload([prompt], [length]), decoder).flops == sum(counts["Global"].values())


def test_tied_weights_are_counted_once_and_as_the_head(tmp_path: Path) -> None:
    for tied in (True, False):
        make_model("llama", tie_word_embeddings=tied).save_pretrained(tmp_path / str(tied))
    tied, untied = (read_decoder(tmp_path / name) for name in ("True", "False"))
    assert tied == untied
    assert tied is not None
    assert tied.head_weights == VOCAB * 24


@pytest.mark.parametrize(
    "changed",
    [
        {"sliding_window": 7},
        {"layer_types": ["sliding_attention", "full_attention"]},
        {"num_attention_heads": None},
    ],
)
def test_a_model_that_the_formula_does_not_describe_has_no_floor(
    llama: LlamaForCausalLM, tmp_path: Path, changed: dict[str, Any]
) -> None:
    llama.save_pretrained(tmp_path)
    assert read_decoder(tmp_path) is not None
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changed))
    assert read_decoder(tmp_path) is None


def test_the_floor_is_the_slower_of_computing_and_reading_at_the_usual_rates() -> None:
    rates = Rates(100.0, 10.0), Rates(50.0, 40.0, multiply_adds_per_s=120.0), Rates(300.0, 90.0)
    assert Floor(Least(flops=1000, num_bytes=80), rates).seconds == 10.0
    assert Floor(Least(flops=1000, num_bytes=800), rates).seconds == 20.0
    assert Floor(Least(1, 1), rates).usual == Rates(100.0, 40.0, 120.0)
