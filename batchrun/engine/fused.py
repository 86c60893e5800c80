"""Modules that compute with a device's own kernels, in the place of a transformers model's."""

import torch
from torch import Tensor, nn

from batchrun_kernels.elementwise import Activation
from batchrun_kernels.layers import LayerKernels, Weight


class FusedLinear(nn.Module):
    """x @ weight.T + bias. In float32 on a CPU, a row's bits do not depend on the rows beside it."""

    def __init__(self, packed: Weight, bias: Tensor | None) -> None:
        super().__init__()
        self.packed = packed
        self.bias = bias  # [num_outputs]
        # Empty: modeling code asks a linear layer's weight for its dtype; whoever multiplied by it would fail.
        self.weight = packed.place

    def forward(
        self,
        x: Tensor,  # [..., k]
    ) -> Tensor:
        """[..., num_outputs]."""
        return self.packed.linear(x, self.bias)


class FusedEmbedding(nn.Module):
    """Rows of a weight that is packed because an output layer shares it, times `factor`."""

    def __init__(self, packed: Weight, factor: float) -> None:
        super().__init__()
        self.packed = packed
        self.factor = factor

    def forward(
        self,
        ids: Tensor,  # int64 [...]
    ) -> Tensor:
        """[..., k]."""
        rows = self.packed.rows(ids)
        return rows if self.factor == 1 else rows * self.factor


class FusedNorm(nn.Module):
    """x / sqrt(mean of squares + eps) * weight."""

    def __init__(self, weight: Tensor, eps: float, kernels: LayerKernels) -> None:
        super().__init__()
        self._kernels = kernels
        self.weight = weight.contiguous()  # [n]
        self.eps = eps

    def forward(
        self,
        x: Tensor,  # [..., n]
    ) -> Tensor:
        """[..., n]."""
        return self._kernels.rms_norm(x, self.weight, self.eps)


class FusedGlu(nn.Module):
    """down(activation(gate) * up), where `gate_up` gives a row's gates before its ups."""

    def __init__(self, gate_up: nn.Module, down: nn.Module, activation: Activation, kernels: LayerKernels) -> None:
        super().__init__()
        self._kernels = kernels
        self.gate_up = gate_up
        self.down = down
        self.activation = activation

    def forward(
        self,
        x: Tensor,  # [..., k]
    ) -> Tensor:
        """[..., k]."""
        hidden: Tensor = self.down(self._kernels.glu(self.gate_up(x), self.activation))
        return hidden


def joined_bias(
    biases: list[Tensor | None],
    sizes: list[int],
) -> Tensor | None:
    """The biases of weights of these sizes one after another, zeros for one that has none; None if none has one."""
    if all(bias is None for bias in biases):
        return None
    like = next(bias for bias in biases if bias is not None)
    return torch.cat([like.new_zeros(n) if bias is None else bias for bias, n in zip(biases, sizes, strict=True)])
