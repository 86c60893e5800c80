"""Attention stated slowly and obviously: one query at a time, one position at a time looked up in the table."""

import torch
from torch import Tensor

from batchrun_kernels.contract import Feature, KVLayer, Layout, Mask, Work
from batchrun_kernels.layout import SlotMajor


class ReferenceAttention:
    """The oracle of the tests; computes in `dtype` whatever the inputs' dtype is."""

    name = "reference"
    features: frozenset[Feature] = frozenset({"window", "softcap", "sinks"})
    layout: Layout = SlotMajor()
    supports_graphs = False
    runs_layers = False

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        self._dtype = dtype

    def fits(self, layer: KVLayer, dtype: torch.dtype) -> bool:
        return True

    def plan(self, work: Work) -> Work:
        return work

    def attend(
        self,
        q: Tensor,  # [num_tokens, num_heads, head_dim]
        keys: Tensor,  # [num_blocks, block_size, kv_heads, head_dim]
        values: Tensor,  # [num_blocks, block_size, kv_heads, value_dim]
        plan: Work,
        mask: Mask,
    ) -> Tensor:
        """[num_tokens, num_heads, value_dim] in q's dtype."""
        out = q.new_zeros(q.shape[0], q.shape[1], values.shape[-1])
        row = 0
        for item, (q_len, kv_len) in enumerate(zip(plan.q_lens, plan.kv_lens, strict=True)):
            for position in range(kv_len - q_len, kv_len):
                first = 0 if mask.window is None else max(0, position - mask.window + 1)
                slots = [_slot(plan, item, seen) for seen in range(first, position + 1)]
                out[row] = self._one(q[row], keys.flatten(0, 1)[slots], values.flatten(0, 1)[slots], mask)
                row += 1
        return out

    def _one(
        self,
        q: Tensor,  # [num_heads, head_dim]
        keys: Tensor,  # [num_seen, kv_heads, head_dim]
        values: Tensor,  # [num_seen, kv_heads, value_dim]
        mask: Mask,
    ) -> Tensor:
        heads = []
        group = q.shape[0] // keys.shape[1]
        for head in range(q.shape[0]):
            scores = keys[:, head // group].to(self._dtype) @ q[head].to(self._dtype) * mask.scale  # [num_seen]
            if mask.softcap is not None:
                scores = mask.softcap * torch.tanh(scores / mask.softcap)
            if mask.sinks is not None:
                scores = torch.cat([scores, mask.sinks[head : head + 1].to(self._dtype)])
            weights = scores.softmax(0)[: len(keys)]
            heads.append(weights @ values[:, head // group].to(self._dtype))
        return torch.stack(heads).to(q.dtype)


def _slot(work: Work, item: int, position: int) -> int:
    block = int(work.block_table[item, position // work.block_size])
    return block * work.block_size + position % work.block_size
