"""The likeliest token behind each position without logits: a step's would be written, and read again, for one number.

Only for a model whose logits are what one packed weight gives of its hidden states, and nothing else.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from batchrun.engine.attention import run_packed
from batchrun.engine.batch import ForwardBatch
from batchrun.engine.fused import FusedLinear
from batchrun.engine.kv_cache import KVCache
from batchrun_kernels.packed import PackedWeight


class _Keeping(nn.Module):
    """Stands for the head: keeps what it is given, and gives the first number of each row for logits."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.empty(0)

    def forward(
        self,
        hidden: Tensor,  # [1, num, hidden_size]
    ) -> Tensor:
        """[1, num, 1]."""
        self.hidden = hidden
        return hidden[..., :1]


class GreedyHead:
    """The head of `module`, a transformers model that computes attention over blocks."""

    def __init__(self, module: Any, weight: PackedWeight) -> None:
        self._module = module
        self._weight = weight

    @classmethod
    def find(cls, module: Any) -> "GreedyHead | None":
        """Of a module whose logits are its head's output and nothing else; None: the head is no packed weight."""
        head = module.get_output_embeddings()
        is_packed = isinstance(head, FusedLinear) and head.bias is None and isinstance(head.packed, PackedWeight)
        return cls(module, head.packed) if is_packed else None

    def likeliest(self, batch: ForwardBatch, cache: KVCache, plan: Any) -> tuple[Tensor, Tensor]:
        """The largest logit, float32 [num_sampled], and its token, int64 [num_sampled]; see `run_packed`."""
        head, keeping = self._module.get_output_embeddings(), _Keeping()
        self._module.set_output_embeddings(keeping)
        try:
            run_packed(self._module, batch, cache, plan)
        finally:
            self._module.set_output_embeddings(head)
        return self._weight.largest(keeping.hidden[0])


@contextmanager
def head_outputs(module: Any) -> Iterator[list[Any]]:
    """What the module's head gives in the block, call after call; of a module without a head, nothing."""
    head, outputs = module.get_output_embeddings(), list[Any]()
    if head is None:
        yield outputs
        return
    hook = head.register_forward_hook(lambda _, __, output: outputs.append(output))
    try:
        yield outputs
    finally:
        hook.remove()
