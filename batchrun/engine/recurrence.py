"""Layers with a recurrent state in a packed step: the model's own code, called once for all rows of as many tokens.

Such a layer keeps a window of its inputs and a matrix that each token changes, as transformers' `LinearAttentionLayer`
does. Which modules are such layers is found by cutting a text: one that gives other numbers then is none.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, LinearAttentionLayer

from batchrun.engine.probe import equals, has_hooks
from batchrun.engine.state_pool import StatePool

_NUM_TOKENS, _CUTS = 9, (4, 1, 4)


class PackedRecurrence(nn.Module):
    """Called as transformers calls `mixer`, with a `KVCache`. Its states have two numbers in the pool."""

    def __init__(self, mixer: nn.Module, layers: tuple[int, int], like: tuple[Tensor, Tensor]) -> None:
        super().__init__()
        self.mixer = mixer
        self.states_like = dict(zip(layers, like, strict=True))

    def forward(
        self,
        hidden_states: Tensor,  # [1, num_tokens, width]
        *,
        cache: Any,
        **_: Any,
    ) -> Tensor:
        """[1, num_tokens, width]."""
        pool: StatePool = cache.states
        result = torch.empty_like(hidden_states)
        before = [pool.read(layer) for layer in self.states_like]
        after = [torch.empty_like(states) for states in before]
        for group in pool.groups():
            found, states = _continued(self.mixer, hidden_states[0, group.tokens], [own[group.items] for own in before])
            result[0, group.tokens] = found
            for own, new in zip(after, states, strict=True):
                own[group.items] = new
        for layer, own in zip(self.states_like, after, strict=True):
            pool.write(layer, own)
        return result


def pack_recurrences(model: nn.Module, width: int, first_layer: int) -> int:
    """Replaces in place what keeps such a state and computes the same however a text is cut; how many.

    Their states have numbers from `first_layer` on.
    """
    places = [(parent, name, child) for parent in list(model.modules()) for name, child in parent.named_children()]
    num_found = 0
    for parent, name, child in places:
        like = _probed(child, width)
        if like is not None:
            first = first_layer + 2 * num_found
            setattr(parent, name, PackedRecurrence(child, (first, first + 1), like))
            num_found += 1
    return num_found


def _probed(module: nn.Module, width: int) -> tuple[Tensor, Tensor] | None:
    """Empty tensors of its states; None where it has others, or computes something else of a text that is cut."""
    convs = [child for child in module.children() if isinstance(child, nn.Conv1d)]
    if len(convs) != 1 or not hasattr(module, "layer_idx") or has_hooks(module):
        return None
    x = torch.randn(1, _NUM_TOKENS, width, generator=torch.Generator().manual_seed(0)).to(convs[0].weight)
    try:
        with torch.inference_mode():
            layer: Any = LinearAttentionLayer()
            whole = module(hidden_states=x, cache=_cache(module, layer))
            # None where it keeps no such state, which `zeros_like` raises for.
            states = [torch.zeros_like(layer.conv_states[0]), torch.zeros_like(layer.recurrent_states[0])]
            parts = []
            for part in torch.split(x, list(_CUTS), dim=1):
                found, states = _continued(module, part, states)
                parts.append(found)
    except Exception:
        # Whatever a module of an unknown kind raises: it is not of the kind in question.
        return None
    if not isinstance(whole, Tensor) or not equals(torch.cat(parts, dim=1), whole):
        return None
    conv, recurrent = (own.new_empty(0, *own.shape[1:]) for own in states)
    return conv, recurrent


def _continued(
    module: nn.Module,
    hidden: Tensor,  # [num_rows, num_tokens, width]
    states: list[Tensor],  # [num_rows, *shape] each
) -> tuple[Tensor, list[Tensor]]:
    """What the module makes of rows behind these states, and the states that follow."""
    layer: Any = LinearAttentionLayer()
    layer.conv_states[0], layer.recurrent_states[0] = (own.clone() for own in states)
    layer.conv_kernel_size[0] = states[0].shape[-1]
    for is_there in (layer.is_conv_states_initialized, layer.is_recurrent_states_initialized, layer.has_previous_state):
        is_there[0] = True
    result: Tensor = module(hidden_states=hidden, cache=_cache(module, layer))
    return result, [layer.conv_states[0], layer.recurrent_states[0]]


def _cache(module: Any, layer: LinearAttentionLayer) -> Cache:
    """One that has this layer where the module looks for it."""
    return Cache(layers=[layer] * (module.layer_idx + 1))
