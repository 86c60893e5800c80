"""A causal language model in two halves: its layers up to the last norm, and the head that makes logits of that.

So logits can be made of a few positions at a time, and none where only the hidden state is wanted. Both halves are the
model's own code: for the head the layers give way to what they have computed, so that whatever a family does to its
logits (scaling, a softcap) is done.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from batchrun.engine.batch import ForwardBatch
from batchrun.engine.kv_cache import KVCache
from batchrun.errors import ModelUnavailable


class _Computed(nn.Module):
    """Stands for the layers: gives back what they have computed."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self._output = output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._output


class Halves:
    """The two halves of `module`, a transformers model that computes attention over blocks."""

    def __init__(self, module: Any) -> None:
        """Raises ModelUnavailable: the model is not made of two."""
        self._module = module
        self._name: str = module.base_model_prefix
        self._kind: Any = BaseModelOutputWithPast  # what these layers return
        if not isinstance(module._modules.get(self._name), nn.Module):
            raise ModelUnavailable(f"{type(module).__name__} has no layers apart from its head; it can only generate")

    def hidden(self, batch: ForwardBatch, cache: KVCache, plan: Any) -> Tensor:
        """[num_sampled, hidden_size] of the batch's `sampled` tokens, as the head gets it."""
        cache.begin(batch, plan)
        layers = self._module._modules[self._name]
        output = layers(input_ids=batch.input_ids, position_ids=batch.positions, cache=cache, use_cache=False)
        self._kind = type(output)
        hidden: Tensor = output.last_hidden_state[0, batch.sampled]
        return hidden

    def logits(
        self,
        hidden: Tensor,  # [num, hidden_size]
    ) -> Tensor:
        """[num, vocab]."""
        with self._given(hidden[None]):
            ids = torch.zeros((1, len(hidden)), dtype=torch.int64, device=hidden.device)
            logits: Tensor = self._module(input_ids=ids, use_cache=False).logits[0]
        return logits

    @contextmanager
    def _given(self, hidden: Tensor) -> Iterator[None]:
        layers = self._module._modules[self._name]
        self._module._modules[self._name] = _Computed(self._kind(last_hidden_state=hidden))
        try:
            yield
        finally:
            self._module._modules[self._name] = layers
