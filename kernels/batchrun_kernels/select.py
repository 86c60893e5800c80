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


def check_kv_dtype(attention: Attention, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """Raises UnsupportedError where the attention cannot read keys and values of `kv_dtype` for queries of `dtype`."""
    is_narrower = isinstance(attention, NativeAttention) and (dtype, kv_dtype) == (torch.float32, torch.float16)
    if kv_dtype != dtype and not is_narrower:
        wanted, own = (str(one).removeprefix("torch.") for one in (kv_dtype, dtype))
        raise UnsupportedError(f"the {attention.name} attention keeps keys and values in {own} here, not in {wanted}")


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
