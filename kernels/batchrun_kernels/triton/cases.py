"""The launches that the compile gate compiles: every entry of the table of tiles, every kernel, every switch.

Shapes are an 8B Llama's where nothing else is said. Only dtypes, strides and sizes matter: tensors are tiny or empty.
"""

from collections.abc import Iterator

import numpy as np
import torch

from batchrun_kernels.contract import Mask
from batchrun_kernels.pieces import Merges
from batchrun_kernels.triton.activation import glu_launch
from batchrun_kernels.triton.attend import attend_launch, empty_partials
from batchrun_kernels.triton.configs import TILES, Architecture, Kind, has_float8, tiles
from batchrun_kernels.triton.copy_blocks import copy_blocks_launch
from batchrun_kernels.triton.launch import Launch
from batchrun_kernels.triton.linear_lse import empty_slices, linear_lse_launch
from batchrun_kernels.triton.lists import DeviceLists, to_device
from batchrun_kernels.triton.merge import merge_launch
from batchrun_kernels.triton.norm import add_rms_norm_launch
from batchrun_kernels.triton.pool import Pool
from batchrun_kernels.triton.sample import Draws, sample_launch
from batchrun_kernels.triton.write_kv import Rotation, rope_launch, write_kv_launch
from batchrun_kernels.worklist import Worklist

Case = tuple[str, Launch]

_HEADS, _KV_HEADS, _BLOCK = 32, 8, 16
_CPU = torch.device("cpu")


def cases(architecture: Architecture) -> Iterator[Case]:
    """Named `kernel kind rows head_dim dtype [switches]`."""
    for arch, head_dim, itemsize, kind in TILES:
        if arch == architecture:
            for dtype in _dtypes(architecture, itemsize):
                yield from _attend(architecture, head_dim, dtype, kind, Mask(0.1), "")
    everything = Mask(0.1, window=1024, softcap=30.0, sinks=torch.zeros(_HEADS))
    yield from _attend(architecture, 128, torch.bfloat16, "wide", everything, " all")
    yield from _attend(architecture, 128, torch.bfloat16, "narrow", everything, " all")
    yield _merge()
    yield from _layers()
    for dtype in [torch.bfloat16, *_dtypes(architecture, 1)]:
        yield _write_kv(dtype)


def _dtypes(architecture: Architecture, itemsize: int) -> list[torch.dtype]:
    """A dtype of that size, and each that is compiled otherwise, as far as the architecture has it."""
    listed = {4: [torch.float32], 2: [torch.bfloat16], 1: [torch.int8, torch.float8_e4m3fn]}
    return [dtype for dtype in listed[itemsize] if dtype != torch.float8_e4m3fn or has_float8(architecture)]


def _lists(run_len: int = 0) -> DeviceLists:
    one = np.zeros(1, np.int32)
    items = np.zeros((1, 7), np.int32)
    merges = Merges(one, np.array([0, 1], np.int32), one)
    return to_device(Worklist(items, items, one, one, merges, 1, run_len), _CPU)


def _attend(
    architecture: Architecture, head_dim: int, dtype: torch.dtype, kind: Kind, mask: Mask, switches: str
) -> Iterator[Case]:
    """Without boxes, which not every pool allows, and with them where the table reads runs."""
    q = torch.zeros(1, _HEADS, head_dim, dtype=torch.float32 if dtype == torch.float32 else torch.bfloat16)
    cut = tiles(architecture, head_dim, dtype)
    for run_len in sorted({0, cut.run_len * cut.of(kind).reads_runs}):
        lists = _lists(run_len)
        partials = empty_partials(lists, q, head_dim)
        launch = attend_launch(q, _pool(head_dim, dtype), lists, mask, torch.empty_like(q), partials, kind, cut)
        name = str(dtype).removeprefix("torch.")
        words = f"attend {kind} {launch.constants['ROWS']} {head_dim} {name}{switches}"
        yield f"{words} boxes" if run_len else words, launch


def _merge() -> Case:
    q = torch.zeros(1, _HEADS, 128, dtype=torch.bfloat16)
    lists = _lists()
    return "merge 128", merge_launch(empty_partials(lists, q, 128), lists, torch.zeros(_HEADS), q)


def _pool(head_dim: int, dtype: torch.dtype) -> Pool:
    keys = torch.zeros(1, _BLOCK, _KV_HEADS, head_dim, dtype=dtype)
    scales = torch.ones(1, _BLOCK, _KV_HEADS) if dtype.itemsize == 1 else None
    return Pool(keys, keys, scales, scales)


def _write_kv(dtype: torch.dtype) -> Case:
    k = torch.zeros(1, _KV_HEADS, 128, dtype=torch.bfloat16)
    rotation = _rotation()
    launch = write_kv_launch(k, k, _pool(128, dtype), torch.zeros(1, dtype=torch.int64), rotation)
    return f"write_kv 128 {str(dtype).removeprefix('torch.')}", launch


def _rotation() -> Rotation:
    cos = torch.zeros(1, 64, dtype=torch.bfloat16)
    return Rotation(cos, cos)


def _layers() -> Iterator[Case]:
    x, q = torch.zeros(1, 4096, dtype=torch.bfloat16), torch.zeros(1, _HEADS, 128, dtype=torch.bfloat16)
    yield "rope 128", rope_launch(q, _rotation(), torch.zeros_like(q))
    yield "add_rms_norm 4096", add_rms_norm_launch(x, x.clone(), x[0], x.clone(), 1e-5)
    yield "add_rms_norm 4096 plus_one", add_rms_norm_launch(x, x.clone(), x[0], x.clone(), 1e-5, plus_one=True)
    gate_up = torch.zeros(1, 2 * 14336, dtype=torch.bfloat16)
    out = torch.zeros(1, 14336, dtype=torch.bfloat16)
    yield "glu 14336 silu", glu_launch(gate_up, out, "silu")
    yield "glu 14336 gelu_tanh", glu_launch(gate_up, out, "gelu_tanh")
    blocks = torch.zeros(2, 1, _BLOCK, _KV_HEADS, 128, dtype=torch.bfloat16)
    ids = torch.zeros(1, dtype=torch.int32)
    yield "sample 128256", _sample()
    yield "linear_lse 64 4096", _linear_lse()
    yield "copy_blocks gather", copy_blocks_launch(blocks, blocks.clone(), ids, None)
    yield "copy_blocks scatter", copy_blocks_launch(blocks, blocks.clone(), None, ids)


def _sample() -> Launch:
    """A row of the length of a vocabulary: whether 16 divides it decides how it is loaded."""
    one, whole = torch.ones(1), torch.zeros(1, dtype=torch.int32)
    draws = Draws(one, one, whole, one, whole.long(), whole, whole)
    return sample_launch(torch.zeros(1, 128256, dtype=torch.bfloat16), draws, whole, one)


def _linear_lse() -> Launch:
    hidden, weight = torch.zeros(1, 4096, dtype=torch.bfloat16), torch.zeros(128, 4096, dtype=torch.bfloat16)
    return linear_lse_launch(hidden, weight, torch.zeros(1, dtype=torch.int64), empty_slices(hidden, 128, 2))
