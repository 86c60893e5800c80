"""A model with weights of int8 computes what its own code computes from the rounded weights, or is refused by name."""

from typing import Any

import pytest
import torch

from batchrun.engine.fused import FusedEmbedding, FusedLinear
from batchrun.engine.fusion import round_weights, rounded_rows
from batchrun.engine.model import Model
from batchrun.errors import ModelUnavailable
from batchrun_kernels import native
from batchrun_kernels.layers import layer_kernels
from batchrun_kernels.packed_int8 import Int8Weight
from tests.device.family_matrix import logits_alone, logits_over_blocks, make_prompts
from tests.device.tiny_families import WIDE, make_model

needs_c = pytest.mark.skipif(native.find() is None, reason="needs the C kernels: a C compiler at installation")
CPU = torch.device("cpu")


@needs_c
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2", "mixtral"])
def test_logits_are_those_of_rounded_weights_and_rows(family: str) -> None:
    """A number next to the middle between two integers may fall on the other side, and moves what comes after it: at
    most positions there is none, and logits move by less than a thousandth of what int8 moves them."""
    prompts, plain, rounded = make_prompts(), make_model(family, **WIDE), make_model(family, **WIDE)
    kernels: Any = layer_kernels(CPU, torch.float32, "int8")
    round_weights(rounded, kernels)
    with rounded_rows(rounded, kernels):
        expected = logits_alone(rounded, prompts)
    again, unrounded = logits_alone(rounded, prompts), logits_alone(plain, prompts)
    got = logits_over_blocks(Model.adopt(plain, quantization="int8"), prompts)
    errors, moved = [], []
    for ours, theirs, before in zip(got, expected, unrounded, strict=True):
        errors.append((ours - theirs[-len(ours) :]).norm(dim=-1))
        moved.append((before - theirs)[-len(ours) :].norm(dim=-1))
    assert float(torch.cat(errors).median()) < 1e-3 * float(torch.cat(moved).median())
    # Nothing of the rounding of rows is left behind.
    assert not torch.equal(again[0], expected[0])


@needs_c
def test_weights_are_packed_as_int8_and_once() -> None:
    module = make_model("llama", tie_word_embeddings=True)
    Model.adopt(module, quantization="int8")
    linears = [one for one in module.modules() if isinstance(one, FusedLinear)]
    assert len(linears) == 2 * 4 + 1
    assert all(isinstance(one.packed, Int8Weight) for one in linears)
    embedding = module.get_input_embeddings()
    assert isinstance(embedding, FusedEmbedding)
    assert embedding.packed is module.lm_head.packed


def test_another_dtype_is_refused_with_the_remedy() -> None:
    with pytest.raises(ModelUnavailable, match=r"int8 are for a CPU, beside float32; leave out --quantization"):
        Model.adopt(make_model("llama").bfloat16(), quantization="int8")


def test_without_the_c_kernels_it_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "find", lambda: None)
    with pytest.raises(ModelUnavailable, match=r"install a C compiler .*; leave out --quantization"):
        Model.adopt(make_model("llama"), quantization="int8")
