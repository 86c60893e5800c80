"""A decoder layer as few operations of a device's own kernels, in the place of a transformers model's."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from batchrun.engine.fused import FusedNorm
from batchrun_kernels import Mask
from batchrun_kernels.layers import LayerKernels


@dataclass(frozen=True, slots=True)
class HeadShape:
    """A layer's heads."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class LayerParts:
    """What a decoder layer is made of.

    h = x + after_attention(out(attention(qkv(norm(x))))) and h + after_mlp(mlp(before_mlp(h))), where attention
    normalises the heads of queries and keys, if there are norms for it, and then turns as much of each as there are
    angles for.
    """

    norm: FusedNorm
    qkv: tuple[nn.Module, ...]  # their outputs, one after another, are all queries, all keys and all values
    q_norm: FusedNorm | None
    k_norm: FusedNorm | None
    out: nn.Module
    after_attention: FusedNorm | None
    before_mlp: FusedNorm
    mlp: nn.Module
    after_mlp: FusedNorm | None
    heads: HeadShape
    mask: Mask
    layer_idx: int


class FusedLayer(nn.Module):
    """Called as transformers calls its own layer, with a `KVCache`."""

    def __init__(self, parts: LayerParts, kernels: LayerKernels) -> None:
        super().__init__()
        self.parts = parts
        self._kernels = kernels
        # Registered, so that who walks a model finds them.
        self.qkv, self.out, self.mlp = nn.ModuleList(parts.qkv), parts.out, parts.mlp

    def forward(
        self,
        hidden_states: Tensor,  # [1, num_tokens, width]
        *,
        position_embeddings: tuple[Tensor, Tensor],  # cos and sin, [1, num_tokens, turned]
        cache: Any,
        **_: Any,
    ) -> Tensor:
        """[1, num_tokens, width]."""
        parts, x = self.parts, hidden_states[0]
        cos, sin = position_embeddings
        q, k, v = self._states(parts.norm(x), cos[0], sin[0])
        cache.write(parts.layer_idx, k, v)
        hidden: Tensor = parts.out(cache.attend(parts.layer_idx, q, parts.mask).flatten(1))
        if parts.after_attention is not None:
            hidden = parts.after_attention(hidden)
        norm = parts.before_mlp
        # `hidden` becomes the sum of both.
        normed = self._kernels.add_rms_norm(x, hidden, norm.weight, norm.eps)
        # A mixture of experts asks for a batch.
        added: Tensor = first_of(parts.mlp(normed[None]))
        if parts.after_mlp is not None:
            added = parts.after_mlp(added)
        return hidden.add_(added[0])[None]

    def _states(
        self,
        x: Tensor,  # [num_tokens, width]
        cos: Tensor,  # [num_tokens, turned]
        sin: Tensor,  # [num_tokens, turned]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each [num_tokens, heads, dim]."""
        parts, heads = self.parts, self.parts.heads
        num_turned = heads.num_heads + heads.num_kv_heads
        each = [linear(x) for linear in parts.qkv]
        states = torch.cat(each, dim=1) if len(each) > 1 else each[0]
        turned = states[:, : num_turned * heads.key_dim].unflatten(1, (num_turned, heads.key_dim))
        v = states[:, num_turned * heads.key_dim :].unflatten(1, (heads.num_kv_heads, heads.value_dim))
        if parts.q_norm is None or parts.k_norm is None:
            turned = self._kernels.rope(turned, cos, sin)
            return turned[:, : heads.num_heads], turned[:, heads.num_heads :], v
        q, k = turned[:, : heads.num_heads], turned[:, heads.num_heads :]
        return self._kernels.rope(parts.q_norm(q), cos, sin), self._kernels.rope(parts.k_norm(k), cos, sin), v


def first_of(result: Any) -> Any:
    """A module's hidden states, where a mixture of experts gives its router's choice too."""
    return result[0] if isinstance(result, tuple) else result
