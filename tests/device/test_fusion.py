"""C kernels in a transformers model: what is known by its behaviour is replaced, and can be given back to the bit."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from batchrun.engine.fused import FusedEmbedding, FusedGlu, FusedLinear, FusedNorm
from batchrun.engine.fused_rotary import fuse_rotary
from batchrun.engine.fusion import fuse
from batchrun.engine.model import Model
from batchrun.engine.probe import Linear, probe_embedding, probe_glu, probe_linear, probe_norm
from batchrun_kernels import native
from batchrun_kernels.elementwise import rope
from batchrun_kernels.layers import layer_kernels
from batchrun_kernels.packed import PackedWeight
from tests.device.tiny_families import make_model

pytestmark = pytest.mark.skipif(native.find() is None, reason="needs the C kernels: a C compiler at installation")

KERNELS: Any = layer_kernels(torch.device("cpu"), torch.float32)
# What is replaced in two layers: linear maps outside of GLUs (lm_head among them), RMSNorms, GLUs, rotary positions.
REPLACED = {
    "llama": (9, 5, 2, 2),
    "mistral": (9, 5, 2, 2),
    "qwen2": (9, 5, 2, 2),
    "qwen3": (9, 9, 2, 2),
    "gemma2": (9, 9, 2, 2),
    "gemma3_text": (9, 13, 2, 2),
    "phi3": (5, 5, 2, 2),
    "olmo2": (9, 9, 2, 2),
    "granite": (9, 5, 2, 2),
    "gpt_oss": (9, 5, 0, 0),
    "mixtral": (9, 5, 0, 2),
    "qwen3_moe": (9, 9, 0, 2),
    "gpt2": (9, 0, 0, 0),
}


def outermost(model: nn.Module, kind: type[nn.Module]) -> list[nn.Module]:
    """Modules of the kind that are not inside a fused GLU."""
    inner = {id(child) for glu in model.modules() if isinstance(glu, FusedGlu) for child in glu.children()}
    return [module for module in model.modules() if isinstance(module, kind) and id(module) not in inner]


@torch.inference_mode()
def logits(model: Any) -> Tensor:
    found: Tensor = model(input_ids=torch.arange(3, 40)[None], use_cache=False).logits
    return found


@pytest.mark.parametrize("family", REPLACED)
def test_what_a_family_has_is_replaced_and_given_back(family: str) -> None:
    model = make_model(family)
    before, weights = logits(model), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fusion = fuse(model, KERNELS)
    counts = [len(outermost(model, kind)) for kind in (FusedLinear, FusedNorm, FusedGlu)]
    turning = [module for module in model.modules() if "forward" in vars(module)]
    assert (*counts, len(turning)) == REPLACED[family]
    # float32 sums in another order through two layers; logits reach 8.
    torch.testing.assert_close(logits(model), before, rtol=0, atol=1e-4)
    fusion.undo()
    assert fusion.num_replaced == 0
    assert not any("forward" in vars(module) for module in model.modules())
    now = model.state_dict()
    assert list(now) == list(weights)
    assert all(torch.equal(now[name], weight) for name, weight in weights.items())
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize(("family", "factor"), [("llama", 1.0), ("gemma3_text", 24**0.5)])
def test_a_weight_shared_by_embedding_and_output_is_packed_once(family: str, factor: float) -> None:
    model = make_model(family, tie_word_embeddings=True)
    before = logits(model)
    fusion = fuse(model, KERNELS)
    embedding, head = model.get_input_embeddings(), model.lm_head
    assert isinstance(embedding, FusedEmbedding)
    assert isinstance(head, FusedLinear)
    assert embedding.packed is head.packed
    assert embedding.factor == pytest.approx(factor)
    torch.testing.assert_close(logits(model), before, rtol=0, atol=1e-4)
    fusion.undo()
    assert torch.equal(logits(model), before)
    assert model.lm_head.weight is model.get_input_embeddings().weight


def test_no_weight_is_held_twice() -> None:
    """Bytes of all tensors that the model's modules hold, by where they lie in memory."""
    model = make_model(
        "llama", tie_word_embeddings=True, vocab_size=64, hidden_size=32, intermediate_size=48, head_dim=8
    )
    plain = sum(parameter.numel() for parameter in model.parameters())
    fusion = fuse(model, KERNELS)
    originals = [replaced.original for replaced in fusion._replaced]
    modules = {id(module): module for root in (model, *originals) for module in root.modules()}.values()
    held = {}
    for module in modules:
        tensors = [*module.parameters(recurse=False), *(v for v in vars(module).values() if isinstance(v, Tensor))]
        tensors += [v.panels for v in vars(module).values() if isinstance(v, PackedWeight)]
        held.update({tensor.data_ptr(): tensor.numel() for tensor in tensors if tensor.numel()})
    assert sum(held.values()) == plain


class Clamped(nn.Linear):
    """Linear up to where it is not."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-10, 10)


class Summed(nn.Linear):
    """Of all that is given at once one number, which has no dimension."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sum()


class Shifted(nn.Embedding):
    """More than a row of its weight."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + ids[..., None]


class Relu(nn.Module):
    """A gated layer with an activation that there is no kernel for."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(6, 9), nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(self.gate(x).relu() * self.up(x))
        return hidden


def test_what_computes_something_else_is_not_recognised() -> None:
    assert probe_linear(nn.Linear(5, 7)) is not None
    assert probe_linear(Clamped(5, 7)) is None
    assert probe_linear(Summed(5, 7)) is None
    assert probe_linear(nn.Linear(5, 7).bfloat16()) is not None
    assert probe_linear(nn.Linear(5, 7).double()) is None
    assert probe_linear(nn.Embedding(5, 7)) is None
    assert probe_linear(nn.Bilinear(5, 5, 7)) is None
    assert probe_norm(nn.RMSNorm(8, eps=1e-6)) is not None
    assert probe_norm(nn.LayerNorm(8)) is None
    assert probe_norm(nn.LayerNorm(8, bias=False)) is None
    assert probe_embedding(nn.Embedding(5, 7)) == 1
    assert probe_embedding(Shifted(5, 7)) is None
    gated = Relu()
    inner = {name: probe_linear(child) for name, child in gated.named_children()}
    known: dict[str, Linear] = {name: one for name, one in inner.items() if one is not None}
    assert len(known) == 3
    assert probe_glu(gated, known) is None


def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Neighbours as pairs, not halves: found under the name that is looked for, and of another formula."""
    rest, sine = (x.repeat_interleave(2, dim=-1)[:, None, :, : q.shape[-1]] for x in (cos, sin))
    turned = [x * rest + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sine for x in (q, k)]
    return turned[0], turned[1]


class Neighbours(nn.Module):
    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return apply_rotary_pos_emb(q, k, cos, sin)


def test_rotary_positions_of_another_formula_are_left_alone() -> None:
    assert not fuse_rotary(Neighbours(), rope)
    assert not fuse_rotary(nn.Linear(5, 7), rope)


def test_a_part_of_a_head_is_turned_by_the_models_own_code() -> None:
    """The compared formula is for whole heads; of a wider head the model's own code leaves the rest as it was."""
    model = make_model("phi3", hidden_size=64, head_dim=16, partial_rotary_factor=0.5)
    before = logits(model)
    assert fuse(model, KERNELS).num_replaced > 2
    torch.testing.assert_close(logits(model), before, rtol=0, atol=1e-4)


def test_code_that_asks_a_linear_layer_for_its_dtype_is_answered() -> None:
    """HunYuan's router does; without an answer the whole model ran in plain torch."""
    linear = nn.Linear(5, 7)
    model = nn.Sequential(linear)
    assert fuse(model, KERNELS).num_replaced == 1
    assert model[0].weight.dtype == torch.float32
    with pytest.raises(RuntimeError, match="mismatch"):
        nn.functional.linear(torch.ones(1, 5), model[0].weight)


def test_a_module_that_somebody_listens_to_is_left_alone() -> None:
    linear = nn.Linear(5, 7)
    linear.register_forward_hook(lambda *_: None)
    assert probe_linear(linear) is None


def test_a_weight_that_an_unknown_module_shares_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(6, 6, bias=False), Clamped(6, 6, bias=False))
    model[1].weight = model[0].weight
    assert fuse(model, KERNELS).num_replaced == 0


def test_a_model_that_is_wrong_with_the_kernels_runs_without_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = PackedWeight.linear
    monkeypatch.setattr(PackedWeight, "linear", lambda self, x, bias: whole(self, x, bias) * 1.01)
    module = make_model("llama", head_dim=8)
    with caplog.at_level(logging.WARNING):
        model = Model.adopt(module)
    assert "running in plain torch" in caplog.text
    assert "different logits" in caplog.text
    assert model.attention.name == "torch"
    assert not any(isinstance(one, FusedLinear) for one in module.modules())


def test_a_models_logits_for_a_row_do_not_depend_on_the_rows_beside_it() -> None:
    model = make_model("llama")
    fuse(model, KERNELS)
    x = torch.randn(13, 24, generator=torch.Generator().manual_seed(0))
    for part in (model.model.layers[0].mlp, model.lm_head, model.model.layers[1].self_attn.q_proj):
        assert torch.equal(torch.cat([part(row[None]) for row in x]), part(x))
