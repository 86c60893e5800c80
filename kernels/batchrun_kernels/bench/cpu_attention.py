"""Attention over the block table in C beside plain torch, in the shapes of SmolLM2-135M."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from batchrun_kernels.bench.case import Case, Prepared, Way, num_cold
from batchrun_kernels.contract import Attention, KVLayer, KVPool, Mask, Work
from batchrun_kernels.cpu import GatherAttention
from batchrun_kernels.native_attention import NativeAttention
from batchrun_kernels.reference import ReferenceAttention

_HEADS, _LAYER, _BLOCK = 9, KVLayer(3, 64, 64), 16
_BATCHES = (32, 64)
_CONTEXTS = (300, 1500)
_KV_DTYPES = (torch.float32, torch.float16)
# (kv_len, positions of it that all rows share)
_SHARED = ((592, 512), (4096, 4032))
_CHUNK, _BEHIND = 512, (0, 1024, 4096)
_CHECKED_STEP = 61
# Averages of values of size one, in float32.
_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class _Checked:
    """The slow reference sees some queries of a chunk only: single rows of `work`, found at `rows` of the result."""

    work: Work
    rows: list[int]

    @classmethod
    def of(cls, work: Work) -> "_Checked":
        rows, kv_lens, items = [], [], []
        first = 0
        for item, (q_len, kv_len) in enumerate(zip(work.q_lens, work.kv_lens, strict=True)):
            for query in sorted({*range(0, q_len, _CHECKED_STEP), q_len - 1}):
                rows.append(first + query)
                kv_lens.append(kv_len - q_len + query + 1)
                items.append(item)
            first += q_len
        return cls(Work((1,) * len(rows), tuple(kv_lens), work.block_table[items], work.block_size), rows)

    def read(
        self,
        attended: Tensor,  # [num_tokens, num_heads, value_dim]
    ) -> Tensor:
        """[num_checked, num_heads, value_dim]."""
        return attended[self.rows]

    def reference(self, q: Tensor, keys: Tensor, values: Tensor, mask: Mask) -> Tensor:
        """[num_checked, num_heads, value_dim]; keys and values slot by slot."""
        slow = ReferenceAttention()
        pool = _filled(slow, keys, values)
        return slow.attend(q[self.rows], pool.keys, pool.values, slow.plan(self.work), mask)


def attention_cases() -> Iterator[Case]:
    for batch in _BATCHES:
        lens = tuple(int(length) for length in torch.linspace(*_CONTEXTS, batch))
        for dtype in _KV_DTYPES:
            yield _case("decode", f"{batch} rows behind {_CONTEXTS[0]}-{_CONTEXTS[1]}", (1,) * batch, lens, dtype)
    for kv_len, shared in _SHARED:
        size = f"{_BATCHES[-1]} rows behind {kv_len}, {shared} of them shared"
        yield _case("decode", size, (1,) * _BATCHES[-1], (kv_len,) * _BATCHES[-1], torch.float32, shared)
    for behind in _BEHIND:
        for dtype in _KV_DTYPES:
            yield _case("chunk", f"{_CHUNK} rows behind {behind}", (_CHUNK,), (behind + _CHUNK,), dtype)


def _case(
    operation: str, size: str, q_lens: tuple[int, ...], kv_lens: tuple[int, ...], kv_dtype: torch.dtype, shared: int = 0
) -> Case:
    seen = sum(q * kv - q * (q - 1) // 2 for q, kv in zip(q_lens, kv_lens, strict=True))
    kv_floats = (sum(kv_lens) - (len(kv_lens) - 1) * shared) * _LAYER.num_kv_heads * (_LAYER.key_dim + _LAYER.value_dim)
    q_floats = sum(q_lens) * _HEADS * (_LAYER.key_dim + _LAYER.value_dim)
    return Case(
        operation,
        f"{size}, {str(kv_dtype).removeprefix('torch.')}",
        num_bytes=kv_dtype.itemsize * kv_floats + 4 * q_floats,
        num_flops=2 * seen * _HEADS * (_LAYER.key_dim + _LAYER.value_dim),
        prepare=partial(_prepare, q_lens, kv_lens, kv_dtype, shared),
    )


def _prepare(q_lens: tuple[int, ...], kv_lens: tuple[int, ...], kv_dtype: torch.dtype, shared: int) -> Prepared:
    """Keys and values are rounded to `kv_dtype` before anything reads them; torch has them in float32."""
    random = torch.Generator().manual_seed(0)
    work = _work(q_lens, kv_lens, shared, random)
    num_blocks = int(work.block_table.max()) + 1
    keys, values = torch.randn(2, num_blocks * _BLOCK, 3, 64, generator=random).to(kv_dtype).float()
    num_copies = num_cold(2 * keys.numel() * kv_dtype.itemsize)
    q = torch.randn(sum(q_lens), _HEADS, 64, generator=random)
    mask = Mask(scale=64**-0.5)
    checked = _Checked.of(work)

    def way(attention: Attention, dtype: torch.dtype = torch.float32) -> Way:
        pools = [_filled(attention, keys, values, dtype) for _ in range(num_copies)]
        plan = attention.plan(work)

        def call(copy: int) -> Tensor:
            return attention.attend(q, pools[copy].keys, pools[copy].values, plan, mask)

        return Way(attention.name, call, checked.read)

    return Prepared(
        (way(NativeAttention(), kv_dtype), way(GatherAttention())),
        partial(checked.reference, q, keys, values, mask),
        _TOLERANCE,
        num_copies,
    )


def _work(q_lens: tuple[int, ...], kv_lens: tuple[int, ...], shared: int, random: torch.Generator) -> Work:
    """Blocks lie anywhere in the pool, and behind the first `shared` positions every item's are its own."""
    counts = [-(-length // _BLOCK) for length in kv_lens]
    free = torch.randperm(sum(counts), generator=random).to(torch.int32)
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    for row, blocks in zip(table, torch.split(free, counts), strict=True):
        row[: len(blocks)] = blocks
    table[:, : shared // _BLOCK] = table[0, : shared // _BLOCK].clone()
    return Work(q_lens, kv_lens, table, _BLOCK)


def _filled(
    attention: Attention,
    keys: Tensor,  # float32 [num_slots, kv_heads, key_dim]
    values: Tensor,  # float32 [num_slots, kv_heads, value_dim]
    dtype: torch.dtype = torch.float32,
) -> KVPool:
    pool = attention.layout.allocate(len(keys) // _BLOCK, _BLOCK, _LAYER, torch.empty(0, dtype=dtype))
    attention.layout.write(pool, keys, values, torch.arange(len(keys)))
    return pool
