"""A decoder layer is recognised by what it computes and asks for, and one that does anything else is left alone."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface

from batchrun.engine.attention import NAME, paged_attention
from batchrun.engine.fused_layer import FusedLayer
from batchrun.engine.fusion import fuse
from batchrun.engine.model import Model
from batchrun_kernels import native
from batchrun_kernels.layers import layer_kernels
from batchrun_kernels.native_attention import NativeAttention
from batchrun_kernels.native_layer import SharedPass
from tests.device.family_matrix import ALL, logits_of_chunks, logits_over_blocks, make_prompts
from tests.device.tiny_families import WIDE, make_model

pytestmark = [
    pytest.mark.skipif(native.find() is None, reason="needs the C kernels: a C compiler at installation"),
    pytest.mark.usefixtures("two_threads"),
]

# Fused layers of two: with biases, norms of heads, norms behind, one product for all heads, experts, part of a head
# turned; and what is not one: a norm of all heads at once, a factor on what is added, LayerNorms.
FUSED = {
    "llama": 2,
    "qwen2": 2,
    "qwen3": 2,
    "gemma2": 2,
    "gemma3_text": 2,
    "phi3": 2,
    "mixtral": 2,
    "qwen3_moe": 2,
    "olmo2": 0,
    "granite": 0,
    "gpt2": 0,
}
# Their bits do not depend on the rows beside a row.
DENSE = ("llama", "qwen2", "qwen3", "gemma2", "gemma3_text")

KERNELS: Any = layer_kernels(torch.device("cpu"), torch.float32)


def fused_layers(module: Any) -> list[FusedLayer]:
    return [one for one in module.modules() if isinstance(one, FusedLayer)]


@pytest.mark.parametrize("family", FUSED)
def test_layers_of_a_family_are_fused(family: str) -> None:
    """That the logits stay the same is compared for every family elsewhere."""
    module = make_model(family)
    Model.adopt(module)
    assert len(fused_layers(module)) == FUSED[family]


def over_blocks() -> Any:
    """A model of two plain layers that asks the cache to attend."""
    module = make_model("llama").eval()
    AttentionInterface.register(NAME, paged_attention)
    module.set_attn_implementation(NAME)
    return module


def test_what_a_layer_asks_of_attention_is_kept() -> None:
    module = make_model("gemma2")
    Model.adopt(module)
    masks = [layer.parts.mask for layer in fused_layers(module)]
    assert [mask.window for mask in masks] == [7, None]
    assert [mask.softcap for mask in masks] == [module.config.attn_logit_softcapping] * 2
    assert [layer.parts.layer_idx for layer in fused_layers(module)] == [0, 1]


def changed(layer: Any, change: Callable[[Tensor, Tensor], Tensor]) -> None:
    """From now on the layer's result is `change(x, result)`."""
    original = layer.forward
    layer.forward = lambda x, **named: change(x, original(x, **named))


@pytest.mark.parametrize(
    "change",
    [
        lambda x, result: result * 1.001,
        lambda x, result: result + x * 0.001,
        lambda x, result: result.clamp(-15, 15),
        lambda x, result: result.double(),
        lambda x, result: (result,),
    ],
)
def test_a_layer_that_computes_something_else_is_left_alone(change: Callable[[Tensor, Tensor], Tensor]) -> None:
    module = over_blocks()
    changed(module.model.layers[1], change)
    fuse(module, KERNELS)
    assert [isinstance(layer, FusedLayer) for layer in module.model.layers] == [True, False]


def test_a_layer_that_somebody_listens_to_is_left_alone() -> None:
    module = over_blocks()
    module.model.layers[0].self_attn.register_forward_hook(lambda *_: None)
    fuse(module, KERNELS)
    assert [isinstance(layer, FusedLayer) for layer in module.model.layers] == [False, True]


def test_a_layer_whose_weights_another_shares_is_left_alone() -> None:
    module = over_blocks()
    first, second = module.model.layers
    second.self_attn.k_proj.weight = first.self_attn.k_proj.weight
    fuse(module, KERNELS)
    assert fused_layers(module) == []


def test_a_layer_without_angles_is_left_alone() -> None:
    """SmolLM3's every fourth layer turns nothing."""
    module = over_blocks()
    first = module.model.layers[0]
    original = first.forward

    def unturned(x: Tensor, position_embeddings: tuple[Tensor, Tensor], **named: Any) -> Any:
        cos, sin = position_embeddings
        return original(x, position_embeddings=(torch.ones_like(cos), torch.zeros_like(sin)), **named)

    first.forward = unturned
    fuse(module, KERNELS)
    assert [isinstance(layer, FusedLayer) for layer in module.model.layers] == [False, True]


def test_fused_layers_are_given_back_to_the_bit() -> None:
    module = over_blocks()
    weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    layers = list(module.model.layers)
    fusion = fuse(module, KERNELS)
    assert len(fused_layers(module)) == 2
    fusion.undo()
    assert [one is other for one, other in zip(module.model.layers, layers, strict=True)] == [True, True]
    assert all(torch.equal(module.state_dict()[name], weight) for name, weight in weights.items())


@torch.inference_mode()
@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("family", DENSE)
def test_a_layer_in_one_call_is_its_kernels_one_by_one_to_the_bit(
    family: str, kv_dtype: torch.dtype, quantization: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = make_model(family, **WIDE)
    model = Model.adopt(module, kv_dtype, quantization)
    assert all(layer._whole is not None for layer in fused_layers(module))
    whole = logits_over_blocks(model, make_prompts())
    monkeypatch.setattr(NativeAttention, "runs_layers", False)
    assert all(map(torch.equal, logits_over_blocks(model, make_prompts()), whole))


@torch.inference_mode()
@pytest.mark.parametrize("name", native.INSTRUCTIONS)
@pytest.mark.parametrize(
    "sizes",
    [
        {"intermediate_size": 16},
        {"intermediate_size": 112},
        {"intermediate_size": 40},  # of no whole panels
        {"intermediate_size": 48, "hidden_size": 1600},  # of more than is multiplied at once
        {"intermediate_size": 48, "hidden_act": "gelu_pytorch_tanh"},
    ],
    ids=str,
)
def test_gates_and_ups_of_one_product_are_those_of_two_kernels_to_the_bit(
    sizes: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = native.needed()
    if native.limit(library, name) != name:
        pytest.skip(f"needs a processor with {name}")
    try:
        model = Model.adopt(make_model("llama", **(WIDE | sizes)))
        assert all(layer._whole is not None for layer in fused_layers(model._module))
        whole = logits_over_blocks(model, make_prompts())
        monkeypatch.setattr(NativeAttention, "runs_layers", False)
        assert all(map(torch.equal, logits_over_blocks(model, make_prompts()), whole))
    finally:
        native.limit(library, native.INSTRUCTIONS[-1])


@torch.inference_mode()
@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("num_read", [(1, 1, 1), (0, 2, 1), (1, 0, 0), (0, 0, 0)])
@pytest.mark.parametrize("family", [*DENSE, "mixtral", "qwen3_moe"])
def test_what_is_read_does_not_depend_on_how_much_else_is(
    family: str, num_read: tuple[int, ...], quantization: Any
) -> None:
    """To the bit, except where torch multiplies experts, whose sums depend on the number of rows."""
    model = Model.adopt(make_model(family, **WIDE), quantization=quantization)
    assert [layer.parts.is_last for layer in fused_layers(model._module)] == [False, True]
    everything = logits_of_chunks(model, make_prompts(), ALL)
    some = logits_of_chunks(model, make_prompts(), num_read)
    for chunks, read, num in zip(everything, some, num_read, strict=True):
        for chunk, last in zip(chunks, read, strict=True):
            expected, tolerance = chunk[max(0, len(chunk) - num) :], 0 if family in DENSE else 1e-5
            torch.testing.assert_close(last, expected, rtol=tolerance, atol=tolerance)


def test_nothing_more_than_keys_and_values_is_computed_of_tokens_that_are_not_read() -> None:
    module = make_model("llama", **WIDE)
    model = Model.adopt(module)
    given: list[Tensor] = []
    module.model.norm.register_forward_pre_hook(lambda _, args: given.append(args[0][0].clone()))
    logits_of_chunks(model, make_prompts(), (1, 0, 2))
    logits_of_chunks(model, make_prompts(), (0, 0, 0))
    assert not any(x.any() for x in given[3:])
    is_computed = [x.any(dim=-1).tolist() for x in given[:3]]
    assert [sum(computed) for computed in is_computed] == [3, 3, 2]
    assert [computed[-2:] for computed in is_computed] == [[True, True]] * 2 + [[False, True]]


@pytest.mark.parametrize("place", ["behind the layers", "in another list"])
def test_no_layer_is_the_last_where_another_may_come_behind_it(place: str) -> None:
    module = over_blocks()
    if place == "behind the layers":
        module.model.layers.append(torch.nn.Identity())
    else:
        module.model.more = torch.nn.ModuleList([module.model.layers[1]])
        del module.model.layers[1]
    fuse(module, KERNELS)
    assert len(fused_layers(module)) == 2
    assert not any(layer.parts.is_last for layer in fused_layers(module))


def test_the_memory_of_a_layers_results_is_enough_and_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN stands behind what a layer asks for, and everything else is written before it is read."""
    asked: list[int] = []

    def scratch(self: SharedPass, num_floats: int) -> Tensor:
        asked.append(num_floats)
        self._memory = torch.full((num_floats + 64,), math.nan)
        before.append(self._memory)
        return self._memory

    before: list[Tensor] = []
    monkeypatch.setattr(SharedPass, "scratch", scratch)
    model = Model.adopt(make_model("qwen3", **WIDE), quantization="int8")
    expected_nan = [bool(one[num:].isnan().all()) for one, num in zip(before, asked, strict=True)]
    assert len(expected_nan) >= 2
    assert all(expected_nan)
    assert all(logits.isfinite().all() for logits in logits_over_blocks(model, make_prompts()))
