"""Every family, packed over blocks in every way a scheduler can cut it, equals its own eager attention."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from batchrun.engine.batch import pack
from batchrun.engine.kv_cache import KVCache
from batchrun.engine.model import Model
from batchrun.engine.step import Item, ScheduledBatch
from batchrun.errors import ModelUnavailable
from batchrun_kernels import Mask, native
from batchrun_kernels.cpu import GatherAttention
from tests.device.steps import Blocks, make_sequence
from tests.device.tiny_families import FAMILIES, VOCAB, make_model

BLOCK = 4
# Row 0 and 1 share 10 tokens: two whole blocks, and two slots of the third by copy.
LENGTHS, SHARED = (26, 19, 31), 10


def make_prompts() -> list[list[int]]:
    random = np.random.default_rng(3)
    rows = [random.integers(3, VOCAB, length).tolist() for length in LENGTHS]
    rows[1][:SHARED] = rows[0][:SHARED]
    return rows


@torch.inference_mode()
def logits_alone(module: Any, prompts: list[list[int]]) -> list[Tensor]:
    return [module(input_ids=torch.tensor([ids]), use_cache=False).logits[0] for ids in prompts]


@torch.inference_mode()
def logits_over_blocks(model: Model, prompts: list[list[int]]) -> list[Tensor]:
    """Three steps: chunks, row 1 joining row 0's blocks in the step that writes them; more chunks; single tokens."""
    blocks = Blocks(num_blocks=40)
    sequences = [make_sequence(row, ids, blocks.take(9)) for row, ids in enumerate(prompts)]
    sequences[1].block_table[:2] = sequences[0].block_table[:2]
    cache = KVCache(40, BLOCK, model.attention, model.place)
    for index, layer in model.kv_layers.items():
        cache.allocate(index, layer)
        cache.pools[index].keys.fill_(torch.nan)
        cache.pools[index].values.fill_(torch.nan)
    third = [sequence.block_table[2] * BLOCK for sequence in sequences]
    copies = ((third[0], third[1]), (third[0] + 1, third[1] + 1))
    spans = [[(0, 13), (SHARED, 5), (0, 17)], [(13, 12), (15, 3), (17, 13)], [(25, 1), (18, 1), (30, 1)]]
    parts: list[list[Tensor]] = [[], [], []]
    for step, cuts in enumerate(spans):
        items = tuple(Item(one, start, num, samples=True) for one, (start, num) in zip(sequences, cuts, strict=True))
        batch = pack(ScheduledBatch(items, slot_copies=copies if step == 0 else ()), BLOCK, torch.device("cpu"))
        batch = replace(batch, sampled=torch.arange(batch.input_ids.shape[1]))
        for own, part in zip(parts, torch.split(model.forward(batch, cache), [num for _, num in cuts]), strict=True):
            own.append(part)
    return [torch.cat(own) for own in parts]


@pytest.mark.parametrize("kernels", ["torch", "c", "c but its attention"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_chunked_and_shared_equals_eager(family: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a compiler, and with the C kernels; those attend to heads of multiples of 8 only."""
    if kernels == "torch":
        monkeypatch.setattr(native, "find", lambda: None)
    elif native.find() is None:
        pytest.skip("needs the C kernels: a C compiler when the package was installed")
    prompts = make_prompts()
    wide = {"n_embd": 32} if family == "gpt2" else {"hidden_size": 32, "head_dim": 8}
    module = make_model(family, **(wide if kernels == "c" else {}))
    expected = logits_alone(module, prompts)
    expected[1] = expected[1][SHARED:]
    model = Model.adopt(module)
    assert model.attention.name == ("c" if kernels == "c" else "torch")
    got = logits_over_blocks(model, prompts)
    for ours, theirs in zip(got, expected, strict=True):
        # float32 sums in another order through two layers; logits reach 8, and 2.5e-5 (Mixtral) is the worst measured.
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt_oss"])
def test_the_comparison_sees_a_dropped_argument(family: str) -> None:
    """Dropping window, softcap or sinks moves the logits far beyond the tolerance above."""
    prompts = make_prompts()
    dropped: dict[str, dict[str, Any]] = {
        "mistral": {"sliding_window": None},
        "gemma2": {"attn_logit_softcapping": None},
        "gpt_oss": {},
    }
    module, without = make_model(family), make_model(family, **dropped[family])
    if family == "gpt_oss":
        for name, parameter in without.named_parameters():
            if "sinks" in name:
                parameter.data.fill_(-1e4)
    apart = (logits_alone(module, prompts)[2] - logits_alone(without, prompts)[2]).abs().max()
    assert float(apart) > 0.05


def test_features_and_layers_are_learned_at_load() -> None:
    model = Model.adopt(make_model("gpt_oss"))
    assert model.needs == {"window", "sinks"}
    assert {index: (layer.num_kv_heads, layer.key_dim) for index, layer in model.kv_layers.items()} == {
        0: (2, 6),
        1: (2, 6),
    }


@pytest.mark.parametrize(
    ("model_type", "facts", "reason"),
    [
        ("falcon", {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}, "in its own code"),
        ("bloom", {"hidden_size": 24, "n_layer": 1, "n_head": 2}, "in its own code"),
        ("mamba", {"hidden_size": 24, "num_hidden_layers": 1, "state_size": 4}, "cannot be run|only attention"),
        (
            "lfm2",
            {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "layer_types": ["conv", "conv"]},
            "layers of type conv",
        ),
    ],
)
def test_a_family_that_cannot_be_run_exactly_is_refused_by_name(
    model_type: str, facts: dict[str, Any], reason: str
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, vocab_size=VOCAB, **facts)
    build: Any = AutoModelForCausalLM.from_config
    module = build(config, attn_implementation="eager")
    name = type(module).__name__
    config.architectures = [name]
    with pytest.raises(ModelUnavailable, match=f"{name}.*({reason})"):
        Model.adopt(module)


def test_a_model_whose_layers_do_not_ask_for_the_configured_window_is_refused() -> None:
    """A window that lives only in the mask would silently become full attention: no mask is made here."""
    module = make_model("mistral")
    module.config.layer_types = ["sliding_attention", "full_attention"]
    with pytest.raises(ModelUnavailable, match="windows"):
        Model.adopt(module)


def test_wrong_attention_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = make_model("llama")
    whole = GatherAttention.attend

    def misplaced(self: GatherAttention, q: Tensor, keys: Tensor, values: Tensor, plan: Any, mask: Mask) -> Tensor:
        return whole(self, q, keys, values.roll(1, 1), plan, mask)

    monkeypatch.setattr(GatherAttention, "attend", misplaced)
    with pytest.raises(ModelUnavailable, match="different logits over blocks than alone"):
        Model.adopt(module)
