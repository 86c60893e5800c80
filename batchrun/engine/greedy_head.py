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

    def __init__(self, head: FusedLinear) -> None:
        super().__init__()
        self.weight = head.weight  # empty: modeling code asks it for its dtype
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

    def __init__(self, module: Any, head: FusedLinear, weight: PackedWeight) -> None:
        self._module = module
        self._head = head
        self._weight = weight

    @classmethod
    def find(cls, module: Any) -> "GreedyHead | None":
        """Of a module whose logits are its head's output and nothing else; None: the head is no packed weight."""
        head = module.get_output_embeddings()
        if not isinstance(head, FusedLinear) or head.bias is not None or not isinstance(head.packed, PackedWeight):
            return None
        found = cls(module, head, head.packed)
        with found._kept() as keeping:
            is_replaced = module.get_output_embeddings() is keeping
        return found if is_replaced else None

    def likeliest(self, batch: ForwardBatch, cache: KVCache, plan: Any) -> tuple[Tensor, Tensor]:
        """The largest logit, float32 [num_sampled], and its token, int64 [num_sampled]; see `run_packed`."""
        with self._kept() as keeping:
            run_packed(self._module, batch, cache, plan)
        return self._weight.largest(keeping.hidden[0])

    @contextmanager
    def _kept(self) -> Iterator[_Keeping]:
        keeping = _Keeping(self._head)
        self._module.set_output_embeddings(keeping)
        try:
            yield keeping
        finally:
            self._module.set_output_embeddings(self._head)


@contextmanager
def head_outputs(module: Any) -> Iterator[list[Any]]:
    """What the module's head gives in the block, call after call; of a module without a head, nothing."""
    head, outputs = module.get_output_embeddings(), list[Any]()
    if head is None:
        yield outputs
        return

    def clone(output: Any) -> Any:
        # What writes into it later is not the head.
        return output.clone() if isinstance(output, Tensor) else output

    hook = head.register_forward_hook(lambda _, __, output: outputs.append(clone(output)))
    try:
        yield outputs
    finally:
        hook.remove()
