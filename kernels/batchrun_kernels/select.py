"""Which attention runs where; what an implementation lacks is refused by name, never ignored."""

import importlib.util
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
    fast = _native() if kind == "cpu" else _triton(torch.device(device))
    if fast is not None and needs <= fast.features and all(fast.fits(layer, dtype) for layer in layers):
        return fast
    attention = GatherAttention(torch.device(device))
    if lacking := needs - attention.features:
        raise UnsupportedError(f"the {attention.name} attention lacks {', '.join(sorted(lacking))}")
    return attention


def _native() -> Attention | None:
    return None if native.find() is None else NativeAttention()


def _triton(device: torch.device) -> Attention | None:
    """None without Triton, and for a GPU that the table of tiles has not."""
    if importlib.util.find_spec("triton") is None:
        return None
    from batchrun_kernels.triton.attention import TritonAttention

    try:
        return TritonAttention(device)
    except UnsupportedError:
        return None
