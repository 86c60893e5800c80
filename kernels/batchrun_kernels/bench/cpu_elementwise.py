"""What stands between the matrix products, in C beside torch, in the shapes of SmolLM2-135M.

Memory is cold here, so that the floor is one; in a model much of it is in a cache.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import rms_norm as torch_rms_norm

from batchrun_kernels import elementwise
from batchrun_kernels.bench.case import Case, Prepared, Way, num_cold
from batchrun_kernels.contract import KVLayer, KVPool
from batchrun_kernels.layout import SlotMajor
from batchrun_kernels.native_attention import ColumnKeys

_ROWS = (64, 512)
_HIDDEN, _INNER, _HEADS, _LAYER, _BLOCK = 576, 1536, 9, KVLayer(3, 64, 64), 16
_EPS = 1e-5
# Values of size one, a few float32 roundings each; gates of size four.
_TOLERANCE = 1e-5


def elementwise_cases() -> Iterator[Case]:
    kv_floats = _LAYER.num_kv_heads * (_LAYER.key_dim + _LAYER.value_dim)
    head_floats = _HEADS * _LAYER.key_dim
    for rows in _ROWS:
        yield _case("rms_norm", f"{rows} rows of {_HIDDEN}", 2 * rows * _HIDDEN, partial(_rms_norm, rows))
    for rows in _ROWS:
        yield _case("glu", f"{rows} rows of {_INNER}", 3 * rows * _INNER, partial(_glu, rows))
    for rows in _ROWS:
        num_floats = 2 * rows * (head_floats + _LAYER.key_dim)
        yield _case("rope", f"{rows} rows, {_HEADS} heads", num_floats, partial(_rope, rows))
    for rows in _ROWS:
        for is_chunk in (False, True):
            size = f"{rows} rows, {'one after another' if is_chunk else 'anywhere'}"
            yield _case("write", size, 2 * rows * kv_floats, partial(_write, rows, is_chunk))


def _case(operation: str, size: str, num_floats: int, prepare: Callable[[], Prepared]) -> Case:
    # Few operations a byte: what counts is the bytes.
    return Case(operation, size, num_bytes=4 * num_floats, num_flops=num_floats, prepare=prepare)


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _rms_norm(rows: int) -> Prepared:
    weight = _random(_HIDDEN, seed=1)
    x = _random(num_cold(4 * rows * _HIDDEN), rows, _HIDDEN)
    return Prepared(
        (
            Way("c", lambda copy: elementwise.rms_norm(x[copy], weight, _EPS)),
            Way("torch", lambda copy: torch_rms_norm(x[copy], (_HIDDEN,), weight, _EPS)),
        ),
        lambda: elementwise.reference_rms_norm(x[0], weight, _EPS),
        _TOLERANCE,
        len(x),
    )


def _glu(rows: int) -> Prepared:
    x = _random(num_cold(8 * rows * _INNER), rows, 2 * _INNER)
    return Prepared(
        (
            Way("c", lambda copy: elementwise.glu(x[copy], "silu")),
            Way("torch", lambda copy: elementwise.reference_glu(x[copy], "silu")),
        ),
        lambda: elementwise.reference_glu(x[0].double(), "silu"),
        _TOLERANCE,
        len(x),
    )


def _rope(rows: int) -> Prepared:
    dim = _LAYER.key_dim
    x = _random(num_cold(4 * rows * _HEADS * dim), rows, _HEADS, dim)
    cos, sin = _random(rows, dim, seed=1), _random(rows, dim, seed=2)
    return Prepared(
        (
            Way("c", lambda copy: elementwise.rope(x[copy], cos, sin)),
            Way("torch", lambda copy: elementwise.reference_rope(x[copy], cos[:, None], sin[:, None])),
        ),
        lambda: elementwise.reference_rope(x[0].double(), cos[:, None].double(), sin[:, None].double()),
        _TOLERANCE,
        len(x),
    )


def _write(rows: int, is_chunk: bool) -> Prepared:
    """What is compared is the slots written, in the order of the rows."""
    kv = _random(num_cold(8 * rows * _LAYER.num_kv_heads * _LAYER.key_dim), 2, rows, _LAYER.num_kv_heads, 64)
    anywhere = torch.randperm(rows * _BLOCK, generator=torch.Generator().manual_seed(1))[:rows]
    slots = torch.arange(rows) if is_chunk else anywhere
    block, offset = slots // _BLOCK, slots % _BLOCK

    def way(name: str, layout: ColumnKeys | SlotMajor, read: Callable[[KVPool], Tensor]) -> Way:
        pool = layout.allocate(rows, _BLOCK, _LAYER, torch.empty(0))

        def call(copy: int) -> KVPool:
            layout.write(pool, kv[copy, 0], kv[copy, 1], slots)
            return pool

        return Way(name, call, read)

    return Prepared(
        (
            way(
                "c",
                ColumnKeys(),
                lambda pool: torch.stack([pool.keys[block, :, :, offset], pool.values[block, :, offset]]),
            ),
            way("torch", SlotMajor(), lambda pool: torch.stack([pool.keys[block, offset], pool.values[block, offset]])),
        ),
        lambda: kv[0],
        0.0,
        len(kv),
    )
