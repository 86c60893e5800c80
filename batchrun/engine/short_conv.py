"""Gated short convolutions in a packed step, in the place of a transformers model's own.

Such a layer mixes a token with the few before it, so its state is its input there. The projections stay the model's.
"""

from typing import Any

import torch
from torch import Tensor, nn

from batchrun.engine.probe import equals, has_hooks, probe_linear
from batchrun.engine.state_pool import StatePool


class PackedShortConv(nn.Module):
    """out(gate * conv(before * x)), where before, gate and x are thirds of inner(hidden); called as transformers calls
    its own, with a `KVCache`."""

    def __init__(self, inner: nn.Module, conv: nn.Conv1d, out: nn.Module, layer: int) -> None:
        super().__init__()
        self.inner, self.conv, self.out = inner, conv, out
        self.layer = layer

    @property
    def weight(self) -> Tensor:
        """[width, channels], a view; the newest token's is the last."""
        return self.conv.weight.detach()[:, 0].T

    @property
    def states_like(self) -> dict[int, Tensor]:
        """An empty tensor of its states, by its number: [0, width - 1, channels]."""
        width, channels = self.weight.shape
        return {self.layer: self.weight.new_empty(0, width - 1, channels)}

    def forward(
        self,
        hidden_states: Tensor,  # [1, num_tokens, channels]
        *,
        cache: Any,
        **_: Any,
    ) -> Tensor:
        """[1, num_tokens, channels]."""
        states: StatePool = cache.states
        weight, windows = self.weight, states.windows(len(self.weight))
        before, gate, x = self.inner(hidden_states)[0].chunk(3, dim=-1)
        rows = torch.cat((states.read(self.layer).flatten(0, 1), before * x))
        states.write(self.layer, rows[windows.last])
        mixed = _convolved([rows[places] for places in windows.taps], weight, self.conv.bias)
        result: Tensor = self.out((gate * mixed)[None])
        return result


def pack_short_convs(model: nn.Module) -> int:
    """Replaces in place what computes a gated short convolution, found by its numbers; how many."""
    found = [
        (parent, name, parts)
        for parent in list(model.modules())
        for name, child in parent.named_children()
        if (parts := _parts(child)) is not None and _explains(parts, child)
    ]
    for layer, (parent, name, parts) in enumerate(found):
        setattr(parent, name, PackedShortConv(*parts, layer))
    return len(found)


def _convolved(
    taps: list[Tensor],  # [num_tokens, channels] each, the newest last
    weight: Tensor,  # [width, channels]
    bias: Tensor | None,
) -> Tensor:
    """[num_tokens, channels], rounded once."""
    total = torch.zeros_like(taps[0], dtype=torch.float32)
    for tap, each in zip(taps, weight, strict=True):
        total.addcmul_(tap.float(), each.float())
    if bias is not None:
        total += bias
    return total.to(taps[0].dtype)


def _parts(module: nn.Module) -> tuple[nn.Module, nn.Conv1d, nn.Module] | None:
    """Its projections and its convolution, by their shapes; None where it is made of anything else."""
    children = list(module.children())
    convs = [child for child in children if isinstance(child, nn.Conv1d)]
    if len(children) != 3 or len(convs) != 1 or any(has_hooks(child) for child in (module, *children)):
        return None
    conv = convs[0]
    width, channels = conv.kernel_size[0], conv.in_channels
    if conv.weight.shape != (channels, 1, width) or conv.stride != (1,) or conv.dilation != (1,):
        return None
    found = {tuple(linear.weight.shape): child for child in children if (linear := probe_linear(child)) is not None}
    inner, out = found.get((3 * channels, channels)), found.get((channels, channels))
    return None if inner is None or out is None else (inner, conv, out)


def _explains(parts: tuple[nn.Module, nn.Conv1d, nn.Module], module: nn.Module) -> bool:
    """Whether the module computes from nothing before them, of a few tokens and of many, what such parts do."""
    inner, conv, out = parts
    width, channels = conv.kernel_size[0], conv.in_channels
    for num_tokens in (1, 3 * width + 1):
        random = torch.Generator().manual_seed(num_tokens)
        x = torch.randn(1, num_tokens, channels, generator=random).to(conv.weight)
        with torch.inference_mode():
            before, gate, own = inner(x)[0].chunk(3, dim=-1)
            padded = torch.cat((own.new_zeros(width - 1, channels), before * own))
            taps = [padded[place : place + num_tokens] for place in range(width)]
            expected = out((gate * _convolved(taps, conv.weight[:, 0].T, conv.bias))[None])
            try:
                found = module(x)
            except Exception:
                # Whatever a module of an unknown kind raises for a plain tensor: it is not of the kind in question.
                return False
        if not isinstance(found, Tensor) or not equals(found, expected):
            return False
    return True
