"""Which attention runs where; what an implementation lacks is refused by name, never ignored."""

from collections.abc import Iterable

import torch

from batchrun_kernels import native
from batchrun_kernels.contract import Attention, Feature, KVLayer, UnsupportedError
from batchrun_kernels.cpu import GatherAttention
from batchrun_kernels.native_attention import NativeAttention


def select(
    device: str,
    needs: frozenset[Feature],
    layers: Iterable[KVLayer] = (),
    dtype: torch.dtype = torch.float32,
) -> Attention:
    """The fastest attention for `device` ("cpu", "cuda", "cuda:1") that has all of `needs` and fits the layers.

    Raises UnsupportedError.
    """
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise UnsupportedError(f"no attention kernel for device {device}; there are cpu and cuda")
    layers = tuple(layers)
    if kind == "cpu" and native.find() is not None:
        fast = NativeAttention()
        if needs <= fast.features and all(fast.fits(layer, dtype) for layer in layers):
            return fast
    attention = GatherAttention()
    if lacking := needs - attention.features:
        raise UnsupportedError(f"the {attention.name} attention lacks {', '.join(sorted(lacking))}")
    return attention
