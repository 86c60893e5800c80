"""The fused layers in a whole model of transformers: found by their behaviour in every dtype, and the same logits."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface

from batchrun.engine.attention import NAME, paged_attention
from batchrun.engine.fused import FusedGlu, FusedNorm
from batchrun.engine.fused_layer import FusedLayer
from batchrun.engine.fusion import fuse
from batchrun_kernels.layers import triton_kernels
from tests.device.tiny_families import make_model

# Norms, GLUs and turned attentions in two layers. Gemma's weights stand for 1 + weight, its activation is a gelu.
REPLACED = {"llama": (5, 2, 2), "gemma2": (9, 2, 2)}
# Roundings in other places; logits reach 8.
ATOL = {torch.float32: 1e-4, torch.bfloat16: 0.15}


@torch.inference_mode()
def logits(model: Any, device: torch.device) -> Tensor:
    found: Tensor = model(input_ids=torch.arange(3, 9, device=device)[None], use_cache=False).logits
    return found.float()


@pytest.mark.parametrize("dtype", ATOL)
@pytest.mark.parametrize("family", REPLACED)
def test_a_fused_model_gives_the_same_logits(family: str, dtype: torch.dtype, device: torch.device) -> None:
    model = make_model(family).to(dtype).to(device)
    before, weights = logits(model, device), {name: one.clone() for name, one in model.state_dict().items()}
    fusion = fuse(model, triton_kernels())
    counts = [sum(isinstance(module, kind) for module in model.modules()) for kind in (FusedNorm, FusedGlu)]
    turning = [module for module in model.modules() if "forward" in vars(module)]
    assert (*counts, len(turning)) == REPLACED[family]
    torch.testing.assert_close(logits(model, device), before, rtol=0, atol=ATOL[dtype])
    fusion.undo()
    assert all(torch.equal(one, weights[name]) for name, one in model.state_dict().items())


@pytest.mark.parametrize("dtype", ATOL)
def test_a_decoder_layer_is_recognised(dtype: torch.dtype, device: torch.device) -> None:
    model = make_model("qwen3").to(dtype).to(device)
    AttentionInterface.register(NAME, paged_attention)
    model.set_attn_implementation(NAME)
    fuse(model, triton_kernels())
    assert [isinstance(layer, FusedLayer) for layer in model.model.layers] == [True, True]
