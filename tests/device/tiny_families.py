"""Tiny random models, one a family: small enough to build in milliseconds, with everything a family's attention has."""

from typing import Any

import torch

VOCAB = 67
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Scores of the size that trained models have: at the usual 0.02 attention is nearly uniform and hides mistakes.
    "initializer_range": 0.4,
    "tie_word_embeddings": False,
}
_HALF_SLIDING = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_local_experts": 3, "num_experts_per_tok": 2}

# model_type: what differs from _COMMON.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 7},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1, **_HALF_SLIDING},
    "qwen3": {},
    "gemma2": {"query_pre_attn_scalar": 6, "attn_logit_softcapping": 1.5, **_HALF_SLIDING},
    "gemma3_text": {"query_pre_attn_scalar": 6, **_HALF_SLIDING},
    "phi3": {"sliding_window": 7},
    "olmo2": {},
    "granite": {"attention_multiplier": 0.3, "residual_multiplier": 0.7},
    "gpt_oss": {**_EXPERTS, **_HALF_SLIDING},
    "mixtral": {**_EXPERTS, "sliding_window": None},
    "qwen3_moe": {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
    "gpt2": {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 256, "n_inner": 20},
}


def make_model(family: str, *, seed: int = 0, **changes: Any) -> Any:
    """A transformers model with random weights that computes eager attention in float32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    build: Any = AutoModelForCausalLM.from_config
    facts = {"vocab_size": VOCAB, "initializer_range": 0.4, **FAMILIES[family]}
    if family != "gpt2":
        facts = {**_COMMON, **FAMILIES[family]}
    config = AutoConfig.for_model(family, **{**facts, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build(config, attn_implementation="eager", dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if "sinks" in name:
                torch.nn.init.normal_(parameter)
    return model.eval()
