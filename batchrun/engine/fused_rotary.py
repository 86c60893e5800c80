"""Rotary positions by a kernel, in an attention module of transformers whose code turns queries and keys itself.

Such a module's `forward` looks a function up by the name below among its globals. If that function, fed random
queries and angles, turns the halves of a head as pairs, the one module gets a `forward` of the same code that finds
the kernel under that name; the class and everybody else keep theirs.
"""

import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from batchrun_kernels.elementwise import reference_rope

_NAME = "apply_rotary_pos_emb"
_TOLERANCE = 1e-5

Rope = Callable[[Tensor, Tensor, Tensor], Tensor]  # as batchrun_kernels.elementwise.rope


def fuse_rotary(module: nn.Module, rope: Rope) -> bool:
    """Gives `module` another `forward`, to be undone by deleting it; False: it is not one that could be."""
    forward: Any = inspect.unwrap(type(module).forward)
    if "forward" in vars(module) or not isinstance(forward, FunctionType) or forward.__closure__:
        return False
    theirs = forward.__globals__.get(_NAME)
    if _NAME not in forward.__code__.co_names or theirs is None or not _turns_halves(theirs):
        return False
    names = {**forward.__globals__, _NAME: _turning_as(theirs, rope)}
    ours = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__)
    ours.__kwdefaults__ = forward.__kwdefaults__
    module.forward = MethodType(ours, module)
    return True


def _turning_as(theirs: Callable[..., Any], rope: Rope) -> Callable[..., Any]:
    """`theirs` by the kernel; a call that asks for more than was compared (part of a head, say) is left to it."""

    def turn(
        q: Tensor,  # [1, num_heads, num_tokens, head_dim]
        k: Tensor,  # [1, kv_heads, num_tokens, head_dim]
        cos: Tensor,  # [1, num_tokens, head_dim]
        sin: Tensor,  # [1, num_tokens, head_dim]
        *more: Any,
        **named: Any,
    ) -> Any:
        """q and k turned by their tokens' angles; views of contiguous [num_tokens, heads, head_dim]."""
        angles = (1, q.shape[2], q.shape[3])
        if more or named or q.shape[0] != 1 or not cos.shape == sin.shape == angles:
            return theirs(q, k, cos, sin, *more, **named)
        return tuple(rope(x[0].transpose(0, 1), cos[0], sin[0]).transpose(0, 1)[None] for x in (q, k))

    return turn


def _turns_halves(function: Any) -> bool:
    random = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 3, 5, 8, generator=random), torch.randn(1, 2, 5, 8, generator=random)
    cos, sin = torch.randn(1, 5, 8, generator=random), torch.randn(1, 5, 8, generator=random)
    try:
        found = function(q, k, cos, sin)
    except Exception:
        # Whatever a function of that name raises when it wants something else.
        return False
    expected = [reference_rope(x, cos[:, None], sin[:, None]) for x in (q, k)]
    return len(found) == 2 and all(
        isinstance(one, Tensor) and one.shape == other.shape and bool((one - other).abs().max() < _TOLERANCE)
        for one, other in zip(found, expected, strict=True)
    )
