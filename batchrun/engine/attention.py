"""The seam to transformers' modeling code: how it is called with a packed step, and the attention it calls back.

`paged_attention`, registered as "batchrun", translates arguments into the kernels' words. An argument that has no
translation is an error: ignoring it would be silently wrong.
"""

from typing import Any

from torch import Tensor, nn

from batchrun.engine.batch import ForwardBatch
from batchrun.engine.kv_cache import KVCache, paged_layer
from batchrun.errors import ModelUnavailable
from batchrun_kernels import Mask

NAME = "batchrun"
# Accepted and without influence: positions are in the plan already, the rest is about what a model returns.
_HARMLESS = frozenset(
    {
        "position_ids",
        "position_embeddings",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "logits_to_keep",
    }
)


def run_packed(module: Any, batch: ForwardBatch, cache: KVCache, plan: Any) -> Tensor:
    """Logits [num_sampled, vocab] of a transformers model whose attention is `paged_attention`, planned for the batch.

    No mask is made: transformers makes none for an attention without a registered mask function.
    """
    cache.begin(batch, plan)
    output = module(
        input_ids=batch.input_ids,
        position_ids=batch.positions,
        cache=cache,
        use_cache=False,
        logits_to_keep=batch.sampled,
    )
    logits: Tensor = output.logits[0]
    return logits


def paged_attention(
    module: nn.Module,
    query: Tensor,  # [1, num_heads, num_tokens, head_dim]
    key: Tensor,  # [1, kv_heads, num_tokens, head_dim], in the pool already
    value: Tensor,  # [1, kv_heads, num_tokens, value_dim], in the pool already
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """([1, num_tokens, num_heads, value_dim], None), attending through the block table of the step.

    Raises ModelUnavailable naming the layer's class and the argument that has no meaning here.
    """
    refused = [name for name, given in others.items() if given is not None and name not in _HARMLESS]
    if attention_mask is not None:
        refused.append("attention_mask")
    if is_causal is False:
        refused.append("is_causal=False")
    if dropout:
        refused.append("dropout")
    if refused:
        raise ModelUnavailable(f"{type(module).__name__} wants an attention with {', '.join(sorted(refused))}")
    paged = paged_layer(key, value)
    if paged is None:
        raise ModelUnavailable(f"{type(module).__name__} attends to other keys and values than the cache is given")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    sinks = None if s_aux is None else s_aux.flatten()
    mask = Mask(scale=scale, window=sliding_window, softcap=softcap, sinks=sinks)
    return paged.attend(query[0].transpose(0, 1), mask)[None], None
