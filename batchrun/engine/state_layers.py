"""The layers of a model that keep states: which they are, and the pool that they need."""

from collections import Counter
from typing import Any

from torch import Tensor

from batchrun.engine.recurrence import PackedRecurrence, pack_recurrences
from batchrun.engine.short_conv import PackedShortConv, pack_short_convs
from batchrun.engine.state_pool import StatePool
from batchrun.errors import ModelUnavailable
from batchrun.model_spec import STATE_LAYERS


def pack_state_layers(model: Any, name: str) -> bool:
    """Such layers of a transformers model give way to ours, which keep states in a pool; whether it has any.

    Raises ModelUnavailable, naming the architecture and the kind, when one of them is none that can be replaced.
    """
    config = model.config.get_text_config(decoder=True)
    kinds = Counter(kind for kind in getattr(config, "layer_types", None) or () if kind in STATE_LAYERS)
    if not kinds:
        return False
    num_convs = pack_short_convs(model)
    found = {"conv": num_convs, "linear_attention": pack_recurrences(model, config.hidden_size, num_convs)}
    if unknown := sorted(kind for kind, number in found.items() if number != kinds[kind]):
        raise ModelUnavailable(f"{name} has layers of type {', '.join(unknown)} whose states cannot be kept apart")
    return True


def states_like(model: Any) -> dict[int, Tensor]:
    """An empty tensor for every state; see `StatePool`."""
    packed = [module for module in model.modules() if isinstance(module, PackedShortConv | PackedRecurrence)]
    return {layer: like for module in packed for layer, like in module.states_like.items()}


def make_states(model: Any, num_slots: int) -> StatePool | None:
    """A pool for the states of this model; None when it has none."""
    like = states_like(model)
    return StatePool(num_slots, like) if like else None
