"""Attention at a model's shapes: decode rows, chunks, and rows that share a prefix, with sharing and without.

And the same cut in other ways than the table's, to find out whether it is right: no entry of it has been timed.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from batchrun_kernels.contract import KVLayer, KVPool, Mask, Work
from batchrun_kernels.pieces import Rules
from batchrun_kernels.triton.attention import TritonAttention, attend_lists
from batchrun_kernels.triton.bench.workload import Checked, Load, Size, Trial, Workload, compared
from batchrun_kernels.triton.configs import Tile, Tiles, architecture, tiles
from batchrun_kernels.triton.head_major import as_slots
from batchrun_kernels.triton.lists import to_device
from batchrun_kernels.worklist import Planner

# Rows of a workload that are compared with plain torch.
_NUM_CHECKED = 6
_USUAL = Rules(group=1, block_size=1)
# What pools are laid out in for the sake of boxes.
_RUN_LEN = 64


@dataclass(frozen=True, slots=True)
class _Lens:
    """Sequences whose first `shared` tokens are the same.

    A sequence's own blocks are consecutive between multiples of `run_len` tokens; 0: they lie anywhere.
    """

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    shared: int = 0
    run_len: int = 0


@dataclass(frozen=True, slots=True)
class Cut:
    """What differs from the table's tiles and the planner's pieces."""

    wide: Tile | None = None
    narrow: Tile | None = None
    wide_piece: int = _USUAL.wide_piece
    narrow_piece: int = _USUAL.narrow_piece

    def __str__(self) -> str:
        words = [
            f"{name} {_words(tile)}"
            for name, tile in (("wide", self.wide), ("narrow", self.narrow))
            if tile is not None
        ]
        pieces = (("wide", self.wide_piece, _USUAL.wide_piece), ("narrow", self.narrow_piece, _USUAL.narrow_piece))
        return ", ".join([*words, *(f"{name} pieces of {piece}" for name, piece, usual in pieces if piece != usual)])


def _words(tile: Tile) -> str:
    boxes = " boxes" if tile.reads_runs else ""
    return f"{tile.rows}x{tile.tokens}{boxes}, {tile.num_warps} warps, {tile.num_stages} stages"


_WIDE = (
    (64, 64, 4, 2),
    (64, 64, 8, 3),
    (64, 32, 4, 3),
    (64, 128, 8, 2),
    (128, 32, 8, 3),
    (128, 64, 8, 2),
    (128, 64, 8, 3),
)
_NARROW = (
    (16, 32, 2, 3),
    (16, 64, 2, 3),
    (16, 64, 4, 2),
    (16, 64, 4, 4),
    (16, 64, 8, 3),
    (16, 128, 4, 2),
    (16, 128, 8, 2),
)
WIDE_CUTS = (*(Cut(wide=Tile(*one)) for one in _WIDE), *(Cut(wide_piece=piece) for piece in (1024, 2048, 8192, 16384)))
NARROW_CUTS = (*(Cut(narrow=Tile(*one)) for one in _NARROW), *(Cut(narrow_piece=piece) for piece in (256, 1024, 2048)))
# Over blocks in runs: the table's tiles for head_dim 128 without boxes, then other tiles with them.
WIDE_RUN_CUTS = (
    Cut(wide=Tile(64, 64, 4, 3)),
    *(Cut(wide=Tile(*one, reads_runs=True)) for one in ((64, 64, 4, 2), (64, 64, 8, 3), (128, 64, 8, 2))),
)
NARROW_RUN_CUTS = (
    Cut(narrow=Tile(16, 64, 4, 3)),
    *(Cut(narrow=Tile(*one, reads_runs=True)) for one in ((16, 64, 2, 3), (16, 64, 4, 2), (16, 64, 4, 4))),
)


def attention_workloads(size: Size, load: Load) -> Iterator[Workload]:
    yield _decode(size, load)
    yield _decode(size, load, run_len=_RUN_LEN)
    for behind in load.behind:
        yield _chunk(size, load, behind)
    yield _chunk(size, load, load.behind[-1], run_len=_RUN_LEN)
    for prefix in load.prefixes:
        lens = _Lens((1,) * load.batch, (prefix + load.suffix,) * load.batch, prefix)
        words = f"{load.batch} rows, {load.suffix} of their own behind {prefix} shared"
        for shares in (True, False):
            yield _workload("attend cascade" if shares else "attend flat", words, lens, size, _chosen(shares))


def cut_workloads(size: Size, load: Load) -> Iterator[Workload]:
    """Decode rows with each of the narrow cuts, the chunk behind most tokens with each of the wide ones."""
    for run_len, cuts in ((0, NARROW_CUTS), (_RUN_LEN, NARROW_RUN_CUTS)):
        for cut in (Cut(), *cuts):
            yield _decode(size, load, cut, run_len=run_len)
    for run_len, cuts in ((0, WIDE_CUTS), (_RUN_LEN, WIDE_RUN_CUTS)):
        for cut in (Cut(), *cuts):
            yield _chunk(size, load, load.behind[-1], cut, run_len=run_len)


def _decode(size: Size, load: Load, cut: Cut | None = None, *, run_len: int = 0) -> Workload:
    contexts = np.random.default_rng(0).integers(*load.contexts, size=load.batch, endpoint=True).tolist()
    lens = _Lens((1,) * load.batch, tuple(contexts), run_len=run_len)
    words = f"{load.batch} rows, context {load.contexts[0]}-{load.contexts[1]}"
    return _workload("attend decode in runs" if run_len else "attend decode", words, lens, size, _cutting(cut), cut)


def _chunk(size: Size, load: Load, behind: int, cut: Cut | None = None, *, run_len: int = 0) -> Workload:
    lens = _Lens((load.chunk,), (behind + load.chunk,), run_len=run_len)
    words = f"{load.chunk} tokens behind {behind}"
    return _workload("attend chunk in runs" if run_len else "attend chunk", words, lens, size, _cutting(cut), cut)


def _workload(
    kernel: str, words: str, lens: _Lens, size: Size, planned: "_Planned", cut: Cut | None = None
) -> Workload:
    """A shared prefix counts once in the bytes, also where it is read for each row: caches may help there."""
    q_lens, kv_lens = np.array(lens.q_lens, np.int64), np.array(lens.kv_lens, np.int64)
    num_read = int((kv_lens - lens.shared).sum()) + lens.shared
    queries = 2 * int(q_lens.sum()) * size.heads * size.head_dim * size.dtype.itemsize
    num_visible = int((q_lens * (kv_lens - q_lens) + q_lens * (q_lens + 1) // 2).sum())
    return Workload(
        kernel,
        words if cut is None else f"{words}, {str(cut) or 'as in the table'}",
        num_read * size.token_bytes + queries,
        4 * num_visible * size.heads * size.head_dim,
        lambda device: _prepare(lens, size, planned, device),
    )


_Attend = Callable[[Tensor, KVPool, Mask], Tensor]
_Planned = Callable[[Work, Size, torch.device], _Attend]


def _chosen(shares_prefixes: bool) -> _Planned:
    """As an engine does it."""

    def planned(work: Work, size: Size, device: torch.device) -> _Attend:
        attention = TritonAttention(device, shares_prefixes=shares_prefixes)
        plan = attention.plan(work)
        return lambda q, pool, mask: attention.attend(q, pool.keys, pool.values, plan, mask)

    return planned


def _cutting(cut: Cut | None) -> _Planned:
    if cut is None:
        return _chosen(shares_prefixes=True)

    def planned(work: Work, size: Size, device: torch.device) -> _Attend:
        usual = tiles(architecture(device), size.head_dim, size.dtype)
        chosen = Tiles(cut.wide or usual.wide, cut.narrow or usual.narrow)
        rules = Rules(
            group=chosen.heads_together(size.heads // size.kv_heads),
            block_size=size.block_size,
            wide_rows=chosen.wide.rows,
            narrow_rows=chosen.narrow.rows,
            run_len=chosen.run_len,
            wide_piece=cut.wide_piece,
            narrow_piece=cut.narrow_piece,
        )
        lists = to_device(Planner(rules).plan(work), device)

        def attend(q: Tensor, pool: KVPool, mask: Mask) -> Tensor:
            out = torch.empty_like(q)
            attend_lists(q, as_slots(pool), lists, mask, out, chosen)
            return out

        return attend

    return planned


def _prepare(lens: _Lens, size: Size, planned: _Planned, device: torch.device) -> Trial:
    work, num_blocks = _work(lens, size.block_size)
    place = torch.zeros((), dtype=size.dtype, device=device)
    layer = KVLayer(size.kv_heads, size.head_dim, size.head_dim)
    pool = TritonAttention.layout.allocate(num_blocks, size.block_size, layer, place)
    pool.keys.normal_()
    pool.values.normal_()
    q = torch.randn(sum(lens.q_lens), size.heads, size.head_dim, dtype=size.dtype, device=device)
    mask = Mask(size.head_dim**-0.5)
    attend = planned(work, size, device)

    def check() -> Checked:
        rows = np.unique(np.linspace(0, len(q) - 1, _NUM_CHECKED).astype(int)).tolist()
        exact = torch.stack([_exact(q[row], row, pool, work, mask) for row in rows])
        return compared(attend(q, pool, mask)[rows], exact, size.tolerance)

    return Trial(lambda: attend(q, pool, mask), check)


def _work(lens: _Lens, block_size: int) -> tuple[Work, int]:
    """The work, over shuffled blocks or runs of them, and how many blocks there are."""
    kv_lens = np.array(lens.kv_lens)
    run_blocks = max(1, lens.run_len // block_size)
    num_shared = lens.shared // block_size
    assert num_shared % run_blocks == 0, (num_shared, run_blocks)
    num_own = -(-(-(-kv_lens // block_size) - num_shared) // run_blocks) * run_blocks
    starts = num_shared + np.cumsum(num_own) - num_own
    num_blocks = int(num_shared + num_own.sum())
    column = np.arange(num_shared + int(num_own.max()))
    logical = np.where(column < num_shared, column, starts[:, None] + column - num_shared)
    runs = np.random.default_rng(1).permutation(num_blocks // run_blocks).astype(np.int32)
    shuffled = (runs[:, None] * run_blocks + np.arange(run_blocks, dtype=np.int32)).ravel()
    table = shuffled[np.minimum(logical, num_blocks - 1)]
    return Work(lens.q_lens, lens.kv_lens, torch.from_numpy(table), block_size), num_blocks


def _exact(
    q: Tensor,  # [num_heads, head_dim]
    row: int,
    pool: KVPool,
    work: Work,
    mask: Mask,
) -> Tensor:
    """float32 [num_heads, value_dim]: one row, from a gathered copy of all that it sees."""
    starts = np.cumsum(work.q_lens) - np.array(work.q_lens)
    item = int(np.searchsorted(starts, row, side="right")) - 1
    num_seen = work.kv_lens[item] - work.q_lens[item] + row - int(starts[item]) + 1
    blocks = work.block_table[item, : -(-num_seen // work.block_size)].to(pool.keys.device, torch.int64)
    k, v = (one[blocks].transpose(0, 1).flatten(1, 2)[:, :num_seen].float() for one in (pool.keys, pool.values))
    grouped = q.float().view(len(k), -1, q.shape[1])  # [kv_heads, group, head_dim]
    return (torch.softmax(grouped @ k.mT * mask.scale, -1) @ v).flatten(0, 1)
