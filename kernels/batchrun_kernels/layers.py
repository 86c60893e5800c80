"""Which kernels a device has for the layers of a model, beside attention, and how it wants weights to lie."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from batchrun_kernels import elementwise, native
from batchrun_kernels.contract import UnsupportedError, WholeLayer
from batchrun_kernels.elementwise import Activation
from batchrun_kernels.native_layer import LayerSpec, NativeLayer, SharedPass
from batchrun_kernels.packed import PackedWeight
from batchrun_kernels.packed_int8 import Int8Weight, round_rows

Quantization = Literal["none", "int8"]


class Weight(Protocol):
    """A weight [num_outputs, k], as its device reads it fastest."""

    @property
    def place(self) -> Tensor:
        """An empty tensor of the weight's dtype on its device."""
        ...

    def linear(
        self,
        x: Tensor,  # [..., k]
        bias: Tensor | None,  # [num_outputs]
    ) -> Tensor:
        """[..., num_outputs]."""
        ...

    def rows(
        self,
        ids: Tensor,  # int64 [...]
    ) -> Tensor:
        """[..., k]."""
        ...

    def unpack(self) -> Tensor:
        """[num_outputs, k], as it was packed."""
        ...


@dataclass(frozen=True, slots=True)
class PlainWeight:
    """As torch has it."""

    weight: Tensor  # [num_outputs, k]

    @classmethod
    def pack(
        cls,
        *weights: Tensor,  # [..., k] each
    ) -> "PlainWeight":
        """Their outputs, one after another."""
        return cls(torch.cat(weights) if len(weights) > 1 else weights[0])

    @property
    def place(self) -> Tensor:
        return self.weight.new_empty(0)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return functional.linear(x, self.weight, bias)

    def rows(self, ids: Tensor) -> Tensor:
        return functional.embedding(ids, self.weight)

    def unpack(self) -> Tensor:
        return self.weight


@dataclass(frozen=True, slots=True)
class LayerKernels:
    """`packs_all`: packed weights are faster; otherwise only those that are joined are worth packing.

    `whole`: makes one call of a layer, for a pool and plans of an attention that `runs_layers`.
    `rounds`: what a weight is packed to is not what it was, nor are the rows that it is multiplied with.
    `round_rows`: what these are rounded to, in plain torch.
    """

    name: str
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]  # x [..., n], weight [n], eps -> [..., n]
    # x [..., n], total [..., n], weight [n], eps -> [..., n]; the total becomes total + x.
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    glu: Callable[[Tensor, Activation], Tensor]  # gates and ups [..., 2n] -> [..., n]
    rope: Callable[[Tensor, Tensor, Tensor], Tensor]  # x [num_tokens, heads, dim], cos and sin [num_tokens, dim]
    pack: Callable[..., Weight]  # of weights [..., k], their outputs one after another
    packs_all: bool
    whole: Callable[[LayerSpec], WholeLayer] | None = None
    rounds: bool = False
    round_rows: Callable[[Tensor], Tensor] = torch.clone  # x [..., k] -> [..., k]


def layer_kernels(device: torch.device, dtype: torch.dtype, quantization: Quantization = "none") -> LayerKernels | None:
    """None: torch's own operations are all there is. Raises UnsupportedError where weights cannot be quantized so."""
    if quantization == "int8":
        if device.type != "cpu" or dtype != torch.float32:
            raise UnsupportedError("weights of int8 are for a CPU, beside float32")
        return replace(_native_kernels(), pack=Int8Weight.pack, rounds=True, round_rows=round_rows)
    if device.type == "cpu" and dtype == torch.float32 and native.find() is not None:
        return _native_kernels()
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        return triton_kernels()
    return None


def _native_kernels() -> LayerKernels:
    if native.find() is None:
        raise UnsupportedError("the C kernels were not built; install a C compiler with OpenMP and reinstall")
    norms = elementwise.rms_norm, elementwise.add_rms_norm
    whole = partial(NativeLayer, shared=SharedPass())
    return LayerKernels("c", *norms, elementwise.glu, elementwise.rope, PackedWeight.pack, packs_all=True, whole=whole)


def triton_kernels() -> LayerKernels:
    """For a GPU; on CPU tensors under Triton's interpreter. Imports Triton."""
    from batchrun_kernels.triton import elementwise as on_gpu

    norms = on_gpu.rms_norm, on_gpu.add_rms_norm
    return LayerKernels("triton", *norms, on_gpu.glu, on_gpu.rope, PlainWeight.pack, packs_all=False)
