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
# Heads that the C attention takes; at 6 it leaves them to torch.
WIDE: dict[str, Any] = {"hidden_size": 32, "head_dim": 8}

_HALF_SLIDING = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
# Layers 2 and 3 read what layers 0 and 1 wrote.
_SHARED_LAYERS = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
}
_LOCAL_EXPERTS = {"num_local_experts": 3, "num_experts_per_tok": 2}
_EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
_ROUTED = {
    "n_routed_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
# Latents, which are shown to the cache, become keys and values of 8 in each of 4 heads.
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}

_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
# As many channels as twice the width, at 24.
_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": "auto", "mamba_n_groups": 1, "mamba_d_state": 8}

# model_type: what differs from _COMMON. Run exactly.
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
    "gpt_oss": {**_LOCAL_EXPERTS, **_HALF_SLIDING},
    "mixtral": {**_LOCAL_EXPERTS, "sliding_window": None},
    "qwen3_moe": _EXPERTS,
    "gpt2": {},
    "afmoe": {**_EXPERTS, "num_shared_experts": 1, "num_dense_layers": 1, **_HALF_SLIDING},
    "apertus": {},
    "arcee": {},
    "aria_text": {},
    "biogpt": {},
    "bitnet": {},
    "codegen": {"rotary_dim": 4},
    "cohere": {},
    "cohere2": _HALF_SLIDING,
    "cohere2_moe": {"num_experts": 3, "num_experts_per_tok": 2, **_HALF_SLIDING},
    "ctrl": {"dff": 20},
    "cwm": _HALF_SLIDING,
    "deepseek_v2": {**_LATENT, **_ROUTED},
    "deepseek_v3": {**_LATENT, **_ROUTED, "n_routed_experts": 4},
    "dots1": _ROUTED,
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_num_experts": 3, "moe_k": 2, "moe_intermediate_size": 20, "moe_layer_start_index": 1},
    "exaone4": {"sliding_window_pattern": "LG", **_HALF_SLIDING},
    "exaone_moe": {**_EXPERTS, **_ROUTED, "is_moe_layer": [False, True], **_HALF_SLIDING},
    "flex_olmo": {"num_experts": 3, "num_experts_per_tok": 2},
    "gemma": {},
    "gemma3n_text": {
        **_SHARED_LAYERS,
        "intermediate_size": [20] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
        "laurel_rank": 4,
        "altup_num_inputs": 2,
    },
    "gemma4_text": {**_SHARED_LAYERS, "global_head_dim": 8},
    "glm": {},
    "glm4": {},
    "glm4_moe": _ROUTED,
    "glm4_moe_lite": {**_LATENT, **_ROUTED},
    "gpt_bigcode": {},
    "gpt_neox": {},
    "gptj": {"rotary_dim": 4},
    "granite_swa": _HALF_SLIDING,
    "granitemoe": _LOCAL_EXPERTS,
    "granitemoe_swa": {**_LOCAL_EXPERTS, **_HALF_SLIDING},
    "granitemoeshared": {**_LOCAL_EXPERTS, "shared_intermediate_size": 20},
    "helium": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {"num_experts": 3, "moe_topk": 2},
    "hyperclovax": {},
    "jais2": {},
    "jetmoe": {"num_local_experts": 3, "kv_channels": 8},
    "laguna": {**_EXPERTS, "shared_expert_intermediate_size": 20},
    "lfm2": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "qwen3_next": {**_EXPERTS, **_DELTA, "shared_expert_intermediate_size": 20},
    "qwen3_5_text": _DELTA,
    "olmo_hybrid": {**_DELTA, "linear_num_key_heads": 4},
    "bamba": {**_MAMBA2, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        **_LOCAL_EXPERTS,
        **_MAMBA2,
        "layer_types": ["mamba", "attention"],
        "shared_intermediate_size": 20,
    },
    "lfm2_moe": {
        **_EXPERTS,
        "num_dense_layers": 1,
        "num_hidden_layers": 3,
        "conv_L_cache": 4,
        "conv_bias": True,
        "layer_types": ["conv", "conv", "full_attention"],
    },
    "llama4_text": {
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 20,
        "moe_layers": [1],
        "layer_types": ["full_attention", "full_attention"],
    },
    "mellum": {**_EXPERTS, **_HALF_SLIDING},
    "mimo_v2_flash": {**_ROUTED, "num_local_experts": 3},
    "minicpm3": _LATENT,
    "minimax_m2": _LOCAL_EXPERTS,
    "ministral": _HALF_SLIDING,
    "ministral3": {},
    "modernbert-decoder": _HALF_SLIDING,
    "nanochat": {},
    "nemotron": {},
    "olmo": {},
    "olmo3": _HALF_SLIDING,
    "olmoe": {"num_experts": 3, "num_experts_per_tok": 2},
    "opt": {"ffn_dim": 20, "word_embed_proj_dim": 24},
    "persimmon": {"partial_rotary_factor": 0.75},
    "phi": {"partial_rotary_factor": 0.75},
    "phimoe": _LOCAL_EXPERTS,
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 20},
    "seed_oss": {},
    "smollm3": {"no_rope_layers": [1, 0]},
    "solar_open": _ROUTED,
    "stablelm": {},
    "starcoder2": {"sliding_window": 7},
    "youtu": _LATENT,
    "vaultgemma": {"query_pre_attn_scalar": 6, "attn_logit_softcapping": 1.5, **_HALF_SLIDING},
}

_OWN = "computes attention in its own code"
_LINEAR = "has layers of type linear_attention"
# model_type: (what differs from _COMMON, why it is refused).
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bloom": ({}, _OWN),
    "falcon": ({"head_dim": None}, _OWN),
    "gpt_neo": ({"num_layers": 2, "attention_types": [[["global", "local"], 1]]}, _OWN),
    "gpt_neox_japanese": ({}, _OWN),
    "mpt": ({}, _OWN),
    "openai-gpt": ({}, _OWN),
    "rwkv": ({}, _OWN),
    "xglm": ({}, _OWN),
    "diffllama": ({}, "attends to other keys and values than it stores"),
    "doge": ({}, "wants an attention with attention_mask"),
    "llama4_text": (
        {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 20, "moe_layers": [1]},
        "has layers of type chunked_attention",
    ),
    "deepseek_v32": (
        {**_LATENT, **_ROUTED, "index_topk": 8, "index_n_heads": 2, "index_head_dim": 8},
        "has layers of type indexed_attention",
    ),
    "mamba": ({"state_size": 4}, _LINEAR),
    "mamba2": ({"num_heads": 6, "head_dim": 8, "state_size": 4, "n_groups": 1}, "has no layers that attend"),
    "falcon_mamba": ({"state_size": 4}, _LINEAR),
    "jamba": ({}, _LINEAR),
    "falcon_h1": ({}, "has layers of type hybrid"),
    "nemotron_h": ({}, "has layers of type mlp, moe"),
    "kimi_linear": ({}, "has no layers that attend"),
    "minimax": ({}, _LINEAR),
    "recurrent_gemma": ({}, _LINEAR),
    "xlstm": ({"num_heads": 6}, "cannot be run over blocks"),
}


def make_model(family: str, *, seed: int = 0, **changes: Any) -> Any:
    """A transformers model with random weights that computes eager attention in float32."""
    facts = FAMILIES[family] if family in FAMILIES else REFUSED[family][0]
    return _make(family, {**_COMMON, **facts, **changes}, seed)


def make_refused(family: str) -> Any:
    """As `make_model`, of the form that is refused, with the name of its architecture in its configuration."""
    model = _make(family, {**_COMMON, **REFUSED[family][0]}, seed=0)
    model.config.architectures = [type(model).__name__]
    return model


def _make(family: str, facts: dict[str, Any], seed: int) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    build: Any = AutoModelForCausalLM.from_config
    # What is turned of a head that is made from latents is a part of its own.
    facts |= {"head_dim": facts.get("qk_rope_head_dim", facts["head_dim"])}
    config = AutoConfig.for_model(family, **{name: value for name, value in facts.items() if value is not None})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build(config, attn_implementation="eager", dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if "sinks" in name:
                torch.nn.init.normal_(parameter)
    return model.eval()
