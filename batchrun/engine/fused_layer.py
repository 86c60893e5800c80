"""A decoder layer as few operations of a device's own kernels, in the place of a transformers model's."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from batchrun.engine.fused import FusedGlu, FusedLinear, FusedNorm
from batchrun_kernels import KVLayer, Mask
from batchrun_kernels.layers import LayerKernels
from batchrun_kernels.native_layer import LayerLinear, LayerNorm, LayerSpec
from batchrun_kernels.packed import PackedWeight
from batchrun_kernels.packed_int8 import Int8Weight


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
    is_last: bool = False  # no layer reads what it gives: only tokens behind which something is read count

    @property
    def kv_layer(self) -> KVLayer:
        return KVLayer(self.heads.num_kv_heads, self.heads.key_dim, self.heads.value_dim)


class FusedLayer(nn.Module):
    """Called as transformers calls its own layer, with a `KVCache`."""

    def __init__(self, parts: LayerParts, kernels: LayerKernels) -> None:
        super().__init__()
        self.parts = parts
        self._kernels = kernels
        # Registered, so that who walks a model finds them.
        self.qkv, self.out, self.mlp = nn.ModuleList(parts.qkv), parts.out, parts.mlp
        spec = _spec(parts)
        self._kv_layer = parts.kv_layer
        self._whole = kernels.whole(spec) if kernels.whole is not None and spec is not None else None

    def forward(
        self,
        hidden_states: Tensor,  # [1, num_tokens, width]
        *,
        position_embeddings: tuple[Tensor, Tensor],  # cos and sin, [1, num_tokens, turned]
        cache: Any,
        **_: Any,
    ) -> Tensor:
        """[1, num_tokens, width]."""
        parts, (cos, sin) = self.parts, position_embeddings
        if self._whole is not None and cache.runs_layers:
            wanted = cache.sampled if parts.is_last else None
            whole: Tensor = cache.run_layer(
                parts.layer_idx, self._whole, self._kv_layer, hidden_states, cos, sin, wanted
            )
            return whole
        x = hidden_states[0]
        q, k, v = self._states(parts.norm(x), cos[0], sin[0])
        cache.write(parts.layer_idx, k, v)
        attended: Tensor = cache.attend(parts.layer_idx, q, parts.mask).flatten(1)
        wanted = cache.sampled if parts.is_last else None
        if wanted is None:
            return self._finish(x, attended)[None]
        result = torch.zeros_like(x)
        result[wanted] = self._finish(x[wanted], attended[wanted])
        return result[None]

    def _finish(
        self,
        x: Tensor,  # [num_tokens, width], what the layer was given
        attended: Tensor,  # [num_tokens, num_heads * value_dim]
    ) -> Tensor:
        """[num_tokens, width]."""
        parts = self.parts
        hidden: Tensor = parts.out(attended)
        if parts.after_attention is not None:
            hidden = parts.after_attention(hidden)
        norm = parts.before_mlp
        # `hidden` becomes the sum of both.
        normed = self._kernels.add_rms_norm(x, hidden, norm.weight, norm.eps)
        # A mixture of experts asks for a batch.
        added: Tensor = first_of(parts.mlp(normed[None]))
        if parts.after_mlp is not None:
            added = parts.after_mlp(added)
        return hidden.add_(added[0])

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


def _spec(parts: LayerParts) -> LayerSpec | None:
    """The same for one call, where every part is of a kind that has it."""
    mlp, heads = parts.mlp, parts.heads
    if len(parts.qkv) != 1 or not isinstance(mlp, FusedGlu):
        return None
    linears = [_linear(module) for module in (parts.qkv[0], parts.out, mlp.gate_up, mlp.down)]
    qkv, out, gate_up, down = linears
    if qkv is None or out is None or gate_up is None or down is None:
        return None
    return LayerSpec(
        norm=LayerNorm(parts.norm.weight, parts.norm.eps),
        qkv=qkv,
        q_norm=_norm(parts.q_norm),
        k_norm=_norm(parts.k_norm),
        out=out,
        after_attention=_norm(parts.after_attention),
        before_mlp=LayerNorm(parts.before_mlp.weight, parts.before_mlp.eps),
        gate_up=gate_up,
        down=down,
        activation=mlp.activation,
        after_mlp=_norm(parts.after_mlp),
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        key_dim=heads.key_dim,
        value_dim=heads.value_dim,
        mask=parts.mask,
    )


def _linear(module: nn.Module) -> LayerLinear | None:
    if isinstance(module, FusedLinear) and isinstance(module.packed, PackedWeight | Int8Weight):
        return LayerLinear(module.packed, module.bias)
    return None


def _norm(norm: FusedNorm | None) -> LayerNorm | None:
    return None if norm is None else LayerNorm(norm.weight, norm.eps)
