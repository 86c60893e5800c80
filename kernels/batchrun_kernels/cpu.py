"""Attention in plain torch: an item's keys and values are gathered by blocks, cut to its length and attended to.

Written for the CPU; plain torch that runs anywhere. One item at a time: no item is padded, and a row's result does
not depend on the rows beside it. Measured for one layer (9 heads, 3 kv heads, head_dim 64, 300-1500 tokens a
row, two shared cores, best of 24, ms at 32 / 64 rows): 10.9 / 20.2 on one thread and 11.8 / 14.5 on two, against
15.9 / 26.1 and 9.9 / 14.4 for length-sorted, padded groups of four rows; larger groups are slower.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from batchrun_kernels.contract import Feature, KVLayer, Layout, Mask, Work
from batchrun_kernels.layout import SlotMajor

# Rows of a chunk whose scores are held at once where SDPA cannot be used.
_TILE_ROWS = 128


@dataclass(frozen=True, slots=True)
class _Item:
    """Queries `row ... row + q_len` of q; `blocks` covers positions 0 ... kv_len."""

    row: int
    q_len: int
    kv_len: int
    blocks: Tensor  # int32 [num_blocks]


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """A step's items; the masks of its chunks are made by the first layer that wants them, for all layers."""

    items: tuple[_Item, ...]
    num_tokens: int
    block_size: int
    max_blocks: int
    masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)


class GatherAttention:
    """Gather by blocks, then two matrix products (decode) or SDPA (chunks)."""

    name = "torch"
    features: frozenset[Feature] = frozenset({"window", "softcap", "sinks"})
    supports_graphs = False
    runs_layers = False
    layout: Layout = SlotMajor()

    def __init__(self, device: torch.device | None = None) -> None:
        """`device` is the pool's; the CPU when not given."""
        self._device = device or torch.device("cpu")

    def fits(self, layer: KVLayer, dtype: torch.dtype) -> bool:
        return True

    def plan(self, work: Work) -> GatherPlan:
        items = []
        row = 0
        tables = work.block_table.to(self._device).unbind(0)
        for q_len, kv_len, table in zip(work.q_lens, work.kv_lens, tables, strict=True):
            items.append(_Item(row, q_len, kv_len, table[: _num_blocks(kv_len, work.block_size)]))
            row += q_len
        return GatherPlan(tuple(items), row, work.block_size, max((len(item.blocks) for item in items), default=0))

    def attend(
        self,
        q: Tensor,  # [num_tokens, num_heads, head_dim]
        keys: Tensor,  # [num_blocks, block_size, kv_heads, head_dim]
        values: Tensor,  # [num_blocks, block_size, kv_heads, value_dim]
        plan: GatherPlan,
        mask: Mask,
    ) -> Tensor:
        """[num_tokens, num_heads, value_dim] in q's dtype."""
        q = q.contiguous()
        out = q.new_empty(q.shape[0], q.shape[1], values.shape[-1])
        if len(q) > plan.num_tokens:
            out[plan.num_tokens :] = 0
        # Overwritten by every item.
        room = keys.new_empty(plan.max_blocks, *keys.shape[1:]), values.new_empty(plan.max_blocks, *values.shape[1:])
        for number, item in enumerate(plan.items):
            skipped = _skipped_blocks(item, plan.block_size, mask.window)
            blocks = item.blocks[skipped:] if skipped else item.blocks
            first = skipped * plan.block_size
            k = _gather(keys, blocks, item.kv_len - first, room[0])
            v = _gather(values, blocks, item.kv_len - first, room[1])
            rows = slice(item.row, item.row + item.q_len)
            if item.q_len == 1:
                _decode(q[item.row], k, v, mask, out[item.row])
            elif mask.softcap is None and mask.sinks is None:
                allowed = _allowed(plan, number, first, mask.window, q.device)
                out[rows] = _sdpa(q[rows], k, v, allowed, mask.scale)
            else:
                allowed = _allowed(plan, number, first, mask.window, q.device)
                _tiled(q[rows], k, v, allowed, mask, out[rows])
        return out


def _num_blocks(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def _skipped_blocks(item: _Item, block_size: int, window: int | None) -> int:
    """Leading blocks that no query of the item can see."""
    if window is None:
        return 0
    return max(0, item.kv_len - item.q_len - window + 1) // block_size


def _gather(
    pool: Tensor,  # [num_blocks, block_size, kv_heads, head_dim]
    blocks: Tensor,  # int32 [num_gathered]
    length: int,
    room: Tensor,  # [max_blocks, block_size, kv_heads, head_dim]
) -> Tensor:
    """[length, kv_heads, head_dim], a view into `room`; slots behind the length are cut off, never masked."""
    gathered = room[: len(blocks)]
    torch.index_select(pool, 0, blocks, out=gathered)
    return gathered.flatten(0, 1)[:length]


def _decode(
    q: Tensor,  # [num_heads, head_dim]
    k: Tensor,  # [num_seen, kv_heads, head_dim]
    v: Tensor,  # [num_seen, kv_heads, value_dim]
    mask: Mask,
    out: Tensor,  # [num_heads, value_dim]
) -> None:
    if mask.window is not None and len(k) > mask.window:
        k, v = k[-mask.window :], v[-mask.window :]
    kv_heads = k.shape[1]
    grouped = q.view(kv_heads, -1, q.shape[-1])  # [kv_heads, group, head_dim]
    scores = torch.bmm(grouped, k.permute(1, 2, 0))  # [kv_heads, group, num_seen]
    weights = _weights(scores, mask, kv_heads)
    torch.bmm(weights, v.transpose(0, 1), out=out.view(kv_heads, -1, out.shape[-1]))


def _sdpa(
    q: Tensor,  # [q_len, num_heads, head_dim]
    k: Tensor,  # [num_seen, kv_heads, head_dim]
    v: Tensor,  # [num_seen, kv_heads, value_dim]
    allowed: Tensor | None,  # bool [q_len, num_seen]; None: q_len == num_seen, causal
    scale: float,
) -> Tensor:
    attended = scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=allowed,
        is_causal=allowed is None,
        scale=scale,
        enable_gqa=True,
    )
    return attended[0].transpose(0, 1)


def _tiled(
    q: Tensor,  # [q_len, num_heads, head_dim]
    k: Tensor,  # [num_seen, kv_heads, head_dim]
    v: Tensor,  # [num_seen, kv_heads, value_dim]
    allowed: Tensor | None,  # bool [q_len, num_seen]; None: q_len == num_seen, causal
    mask: Mask,
    out: Tensor,  # [q_len, num_heads, value_dim]
) -> None:
    kv_heads, num_seen = k.shape[1], len(k)
    if allowed is None:
        allowed = torch.ones(len(q), num_seen, dtype=torch.bool, device=q.device).tril_()
    for start in range(0, len(q), _TILE_ROWS):
        tile = q[start : start + _TILE_ROWS]
        grouped = tile.view(len(tile), kv_heads, -1, tile.shape[-1]).permute(1, 2, 0, 3)
        scores = torch.bmm(grouped.flatten(1, 2), k.permute(1, 2, 0)).view(kv_heads, -1, len(tile), num_seen)
        weights = _weights(scores, mask, kv_heads, allowed[start : start + _TILE_ROWS])
        attended = torch.bmm(weights.flatten(1, 2), v.transpose(0, 1)).view(kv_heads, -1, len(tile), v.shape[-1])
        out[start : start + _TILE_ROWS] = attended.permute(2, 0, 1, 3).flatten(1, 2)


def _weights(
    scores: Tensor,  # [kv_heads, group, ..., num_seen], q.k
    mask: Mask,
    kv_heads: int,
    allowed: Tensor | None = None,  # bool [..., num_seen]
) -> Tensor:
    """The softmax in float32, back in the scores' dtype; same shape, whatever takes part besides."""
    raised = scores.float().mul_(mask.scale) if scores.dtype != torch.float32 else scores.mul_(mask.scale)
    if mask.softcap is not None:
        raised = raised.div_(mask.softcap).tanh_().mul_(mask.softcap)
    if allowed is not None:
        raised = raised.masked_fill_(~allowed, -math.inf)
    if mask.sinks is None:
        return raised.softmax(-1).to(scores.dtype)
    sinks = mask.sinks.to(raised.dtype).view(kv_heads, -1, *[1] * (raised.dim() - 2))
    beside = torch.cat([raised, sinks.expand(*raised.shape[:-1], 1)], dim=-1)
    return beside.softmax(-1)[..., :-1].to(scores.dtype)


def _allowed(plan: GatherPlan, number: int, first: int, window: int | None, device: torch.device) -> Tensor | None:
    """bool [q_len, kv_len - first]: which gathered position each query of a chunk sees; None: plainly causal."""
    item = plan.items[number]
    if item.kv_len == item.q_len and (window is None or window >= item.kv_len):
        return None
    key = number, window
    if key not in plan.masks:
        queries = torch.arange(item.kv_len - item.q_len, item.kv_len, device=device)[:, None]
        seen = torch.arange(first, item.kv_len, device=device)
        allowed = seen <= queries
        plan.masks[key] = allowed if window is None else allowed & (seen > queries - window)
    return plan.masks[key]
