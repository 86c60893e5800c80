"""A work list carried out in plain numpy and float64: what an attention kernel and a merge do with it, item by item."""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchrun_kernels.contract import Mask
from batchrun_kernels.worklist import KV_HI, KV_LO, OFFSET, Q_LEN, Q_LO, SLOT, Worklist

Floats = NDArray[np.float64]


def execute(
    listed: Worklist,
    q: Tensor,  # [num_tokens, num_heads, key_dim]
    keys: Tensor,  # [num_blocks, block_size, kv_heads, key_dim]
    values: Tensor,  # [num_blocks, block_size, kv_heads, value_dim]
    mask: Mask,
) -> Tensor:
    """float64 [num_tokens, num_heads, value_dim]; NaN where no item and no merge writes."""
    queries, all_keys, all_values = (one.double().numpy() for one in (q, keys, values))
    shape = queries.shape[1], all_values.shape[3]
    out = np.full((len(queries), *shape), math.nan)
    partials = np.full((listed.num_slots, *shape), math.nan)
    masses = np.full((listed.num_slots, shape[0]), math.nan)  # log of the sum of exp(score)
    sinks = np.full(shape[0], -math.inf) if mask.sinks is None else mask.sinks.double().numpy()
    block_size = all_keys.shape[1]
    for item in np.concatenate([listed.wide, listed.narrow]):
        seen = np.arange(item[KV_LO], item[KV_HI])
        blocks, within = listed.block_ids[item[OFFSET] + seen // block_size], seen % block_size
        rows = slice(item[Q_LO], item[Q_LO] + item[Q_LEN])
        positions = listed.positions[rows]
        result, mass = _attend(
            queries[rows], all_keys[blocks, within], all_values[blocks, within], seen, positions, mask
        )
        if item[SLOT] < 0:
            out[rows] = _merge(result[None], mass[None], sinks)
        else:
            slots = slice(item[SLOT], item[SLOT] + item[Q_LEN])
            partials[slots], masses[slots] = result, mass
    merges = listed.merges
    for token, start, end in zip(merges.tokens, merges.starts[:-1], merges.starts[1:], strict=True):
        slots = merges.slots[start:end]
        out[token] = _merge(partials[slots], masses[slots], sinks)
    return torch.from_numpy(out)


def _attend(
    q: Floats,  # [num_rows, num_heads, key_dim]
    keys: Floats,  # [num_seen, kv_heads, key_dim]
    values: Floats,  # [num_seen, kv_heads, value_dim]
    seen: NDArray[np.int64],  # [num_seen], positions
    positions: NDArray[np.int32],  # [num_rows]
    mask: Mask,
) -> tuple[Floats, Floats]:
    """([num_rows, num_heads, value_dim], [num_rows, num_heads]): the mean of what is visible, the log of its mass."""
    group = q.shape[1] // keys.shape[1]
    keys, values = keys.repeat(group, 1), values.repeat(group, 1)
    scores = np.einsum("rhd,shd->rhs", q, keys) * mask.scale
    if mask.softcap is not None:
        scores = mask.softcap * np.tanh(scores / mask.softcap)
    visible = seen <= positions[:, None]
    if mask.window is not None:
        visible &= seen > positions[:, None] - mask.window
    scores = np.where(visible[:, None], scores, -math.inf)
    best = scores.max(-1)
    weights = np.exp(scores - np.where(np.isinf(best), 0.0, best)[..., None])
    total = weights.sum(-1)
    means = np.einsum("rhs,shd->rhd", weights, values) / np.where(total > 0, total, 1.0)[..., None]
    with np.errstate(divide="ignore"):
        return means, np.log(total) + np.where(np.isinf(best), 0.0, best)


def _merge(
    means: Floats,  # [num_parts, ..., value_dim]
    masses: Floats,  # [num_parts, ...], logs
    sinks: Floats,  # [num_heads], the log of a mass without a value
) -> Floats:
    """[..., value_dim]."""
    best = np.maximum(masses.max(0), sinks)
    weights = np.exp(masses - best)
    total = weights.sum(0) + np.exp(sinks - best)
    merged: Floats = (means * weights[..., None]).sum(0) / total[..., None]
    return merged
