"""Which modules of a decoder layer play which part, found out by running it on random numbers and listening.

What is found is a guess that explains one call; `probe_layer` returns it only where a layer made of these parts
computes, on other numbers, what the layer itself computes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn

from batchrun.engine.fused import FusedNorm
from batchrun.engine.fused_layer import FusedLayer, HeadShape, LayerParts, first_of
from batchrun.engine.probe import Linear, equals, has_hooks
from batchrun_kernels import Mask
from batchrun_kernels.layers import LayerKernels

_NUM_TOKENS = 5


@dataclass(frozen=True, slots=True)
class Known:
    """What the modules of a model were found to be, by their ids."""

    linears: dict[int, Linear]
    norms: dict[int, FusedNorm]  # what does the same


@dataclass(frozen=True, slots=True)
class _Question:
    """With what a layer attended, and the random numbers that it got for an answer."""

    layer_idx: int
    states: tuple[Tensor, Tensor, Tensor]  # q, k, v, each [num_tokens, heads, dim]
    mask: Mask
    answer: Tensor  # [num_tokens, num_heads, value_dim]


class _Cache:
    """Stands for the `KVCache` of a step, to a fused layer and, with `_Paged`, to one of transformers."""

    is_compileable = False
    runs_layers = False

    def __init__(self) -> None:
        self.question: _Question | None = None
        self._stored: tuple[int, Tensor, Tensor] | None = None

    def update(self, key: Tensor, value: Tensor, layer_idx: int, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        kwargs["paged"] = _Paged(self, layer_idx)
        return key, value

    def write(self, layer_idx: int, key: Tensor, value: Tensor) -> None:
        self._stored = layer_idx, key, value

    def attend(self, layer_idx: int, q: Tensor, mask: Mask) -> Tensor:
        assert self._stored is not None, "nothing to attend to"
        written, key, value = self._stored
        assert written == layer_idx, f"layer {layer_idx} attends to layer {written}"
        answer = _random((*q.shape[:2], value.shape[2]), q, seed=2)
        self.question = _Question(layer_idx, (q, key, value), mask, answer)
        return answer


@dataclass(frozen=True, slots=True)
class _Paged:
    """Stands for a `PagedLayer`."""

    cache: _Cache
    layer_idx: int

    def store(self, key: Tensor, value: Tensor) -> bool:
        self.cache.write(self.layer_idx, key[0].transpose(0, 1), value[0].transpose(0, 1))
        return True

    def attend(self, q: Tensor, mask: Mask) -> Tensor:
        return self.cache.attend(self.layer_idx, q, mask)


@dataclass(frozen=True, slots=True)
class _Heard:
    """A call of a module inside the layer."""

    module: nn.Module
    given: Tensor
    result: Tensor


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of the layer: what it computed and what it asked on the way."""

    result: Tensor
    question: _Question


def probe_layer(layer: nn.Module, known: Known, kernels: LayerKernels) -> LayerParts | None:
    """None where the layer is of another kind, or anything in it is listened to by others."""
    norms = [known.norms[id(module)] for module in layer.children() if id(module) in known.norms]
    if len(norms) < 2 or any(has_hooks(module) for module in layer.modules()):
        return None
    like, width = norms[0].weight, norms[0].weight.shape[0]
    place = next((known.linears[id(module)].weight for module in layer.modules() if id(module) in known.linears), like)
    x = _random((1, _NUM_TOKENS, width), place, seed=0)
    # Angles must fit the heads before it can be heard how wide those are.
    for head_dim in _head_dims(layer):
        with _listening(layer) as heard:
            call = _call(layer, x, head_dim)
        if call is None:
            continue
        for parts in _guesses(call, heard, x, layer, known):
            if _explains(parts, layer, place, width, kernels):
                return parts
    return None


def _head_dims(layer: nn.Module) -> list[int]:
    """Candidates for the width of a head: what the layer's modules say of it."""
    named = [getattr(module, "head_dim", None) for module in layer.modules()]
    return [dim for dim in dict.fromkeys(named) if isinstance(dim, int) and dim % 2 == 0]


def _call(layer: Any, x: Tensor, turned: int) -> _Call | None:
    num_tokens, cache = x.shape[1], _Cache()
    try:
        result = layer(
            x,
            attention_mask=None,
            position_ids=torch.arange(num_tokens, device=x.device)[None],
            position_embeddings=_angles(num_tokens, turned, x),
            cache=cache,
            use_cache=False,
        )
    except Exception:
        # Whatever a module of an unknown kind raises: it is not of the kind in question.
        return None
    if not isinstance(result, Tensor) or result.shape != x.shape or result.dtype != x.dtype or cache.question is None:
        return None
    return _Call(result, cache.question)


@contextmanager
def _listening(layer: nn.Module) -> Iterator[list[_Heard]]:
    heard: list[_Heard] = []

    def hear(module: nn.Module, given: tuple[Any, ...], result: Any) -> None:
        states = first_of(result)
        if len(given) == 1 and isinstance(given[0], Tensor) and isinstance(states, Tensor):
            heard.append(_Heard(module, given[0], states))

    hooks = [module.register_forward_hook(hear) for module in layer.modules()]
    try:
        yield heard
    finally:
        for hook in hooks:
            hook.remove()


def _guesses(call: _Call, heard: list[_Heard], x: Tensor, layer: nn.Module, known: Known) -> Iterator[LayerParts]:
    """Layers that may have made this call, by who was given what."""
    question, children = call.question, {id(child) for child in layer.children()}
    q, k, v = question.states
    shape = HeadShape(q.shape[1], k.shape[1], k.shape[2], v.shape[2])
    norms = [one for one in heard if id(one.module) in known.norms]
    linears = [one for one in heard if id(one.module) in known.linears]
    first = _given(norms, x)
    out = _given(linears, question.answer.flatten(1))
    if first is None or out is None:
        return
    inputs = tuple(one.module for one in linears if _same(one.given, first.result))
    after_attention = _given(norms, out.result)
    added = x + (out if after_attention is None else after_attention).result.view(x.shape)
    before_mlp = next((one for one in norms if one.given.shape == x.shape and equals(one.given, added)), None)
    if before_mlp is None or len(inputs) not in (1, 3):
        return
    mlp = next((one for one in heard if id(one.module) in children and _same(one.given, before_mlp.result)), None)
    if mlp is None:
        return
    after_mlp = _given(norms, mlp.result)
    heads = [one.module for one in norms if one.module not in (first.module, before_mlp.module)]
    heads = [one for one in heads if known.norms[id(one)].weight.shape == (shape.key_dim,)]
    for order in permutations(inputs):
        for q_norm, k_norm in permutations(heads, 2) if heads else [(None, None)]:
            yield LayerParts(
                norm=known.norms[id(first.module)],
                qkv=order,
                q_norm=None if q_norm is None else known.norms[id(q_norm)],
                k_norm=None if k_norm is None else known.norms[id(k_norm)],
                out=out.module,
                after_attention=None if after_attention is None else known.norms[id(after_attention.module)],
                before_mlp=known.norms[id(before_mlp.module)],
                mlp=mlp.module,
                after_mlp=None if after_mlp is None else known.norms[id(after_mlp.module)],
                heads=shape,
                mask=question.mask,
                layer_idx=question.layer_idx,
            )


def _explains(parts: LayerParts, layer: nn.Module, place: Tensor, width: int, kernels: LayerKernels) -> bool:
    """Whether both compute and ask the same, on numbers that the guess has not seen."""
    dim = parts.heads.key_dim
    for num_tokens, scale, turned in ((3, 1.0, dim), (_NUM_TOKENS + 2, 20.0, dim), (_NUM_TOKENS, 1.0, dim // 4 * 2)):
        x = _random((1, num_tokens, width), place, seed=num_tokens) * scale
        theirs, ours = _call(layer, x, turned), _call(FusedLayer(parts, kernels), x, turned)
        # A layer that cannot turn a part of a head is never asked to.
        if theirs is None and turned < dim:
            continue
        if theirs is None or ours is None or not _same_call(ours, theirs):
            return False
    return True


def _same_call(one: _Call, other: _Call) -> bool:
    ours, theirs = one.question, other.question
    return (
        equals(one.result, other.result)
        and all(equals(mine, yours) for mine, yours in zip(ours.states, theirs.states, strict=True))
        and _same_mask(ours.mask, theirs.mask)
        and ours.layer_idx == theirs.layer_idx
    )


def _same_mask(one: Mask, other: Mask) -> bool:
    if (one.scale, one.window, one.softcap) != (other.scale, other.window, other.softcap):
        return False
    if one.sinks is None or other.sinks is None:
        return one.sinks is other.sinks
    return torch.equal(one.sinks, other.sinks)


def _given(heard: list[_Heard], x: Tensor) -> _Heard | None:
    """Who was given these numbers."""
    return next((one for one in heard if _same(one.given, x)), None)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.numel() == other.numel() and torch.equal(one.flatten(), other.flatten())


def _angles(num_tokens: int, turned: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [1, num_tokens, turned] of random angles, which both halves share."""
    angles = _random((1, num_tokens, turned // 2), like, seed=1)
    both = torch.cat((angles, angles), dim=-1).float()
    return both.cos().to(like), both.sin().to(like)


def _random(shape: tuple[int, ...], like: Tensor, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(like)
