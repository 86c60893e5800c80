"""Every family, packed over blocks in every way a scheduler can cut it, equals its own eager attention."""

from typing import Any

import pytest
from torch import Tensor

from batchrun.engine.model import Model
from batchrun.errors import ModelUnavailable
from batchrun_kernels import Mask, native
from batchrun_kernels.cpu import GatherAttention
from tests.device.family_matrix import logits_alone, logits_over_blocks, make_prompts, measure, num_shared
from tests.device.tiny_families import FAMILIES, REFUSED, WIDE, make_model, make_refused

# float32 sums in another order through two layers; logits reach 20, and 7.9e-5 (Qwen2) is the worst measured.
ATOL = 1e-4
# Its own code in float32 is 1.9e-4 from itself in float64, for these prompts.
LOOSE = {"qwen3_next": 3e-4}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_an_engines_tokens_equal_eagers(family: str) -> None:
    """With the C kernels where there are any; an engine with too few blocks cuts, shares, swaps and computes again."""
    served = measure(family, **WIDE)
    assert served.error < LOOSE.get(family, ATOL)
    assert served.greedy_rows == served.num_rows
    assert served.attention == ("torch" if native.find() is None else "c")
    counters = served.counters
    assert min(counters.swap_preemptions, counters.recompute_preemptions) > 0
    assert (counters.cached_tokens > 0) == (not served.has_states)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_eagers_without_the_c_kernels(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "find", lambda: None)
    compare(family, "torch")


@pytest.mark.parametrize("family", ["llama", "gemma3n_text", "gpt_oss", "gpt2"])
def test_logits_equal_eagers_with_the_c_kernels_but_their_attention(family: str) -> None:
    """Heads of 6, which it does not take."""
    compare(family, "torch")


def compare(family: str, attention: str) -> None:
    prompts = make_prompts()
    module = make_model(family)
    expected = logits_alone(module, prompts)
    model = Model.adopt(module)
    expected[1] = expected[1][num_shared(model) :]
    assert model.attention.name == attention
    for ours, theirs in zip(logits_over_blocks(model, prompts), expected, strict=True):
        assert float((ours - theirs).abs().max()) < LOOSE.get(family, ATOL)


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


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_cannot_be_run_exactly_is_refused_by_name(family: str) -> None:
    module = make_refused(family)
    with pytest.raises(ModelUnavailable, match=f"^{type(module).__name__} .*{REFUSED[family][1]}"):
        Model.adopt(module)


def test_layers_that_read_what_others_wrote_have_no_keys_of_their_own() -> None:
    """Two of four layers; the others read their pools, and are not given other ones."""
    assert sorted(Model.adopt(make_model("gemma3n_text")).kv_layers) == [0, 1]


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
