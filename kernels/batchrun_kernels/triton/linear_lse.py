"""The output layer without its logits: for each token, their log-sum-exp, the target's logit and the best one.

A program keeps tiles of logits in registers, for some tokens and a slice of the vocabulary; slices are joined after.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchrun_kernels.triton.attend import tanh
from batchrun_kernels.triton.launch import Launch

_ROWS, _COLUMNS, _DEPTH = 64, 64, 64


@dataclass(frozen=True, slots=True)
class LinearLse:
    """The log-probability of a token's target is `target - lse`."""

    lse: Tensor  # float32 [num_tokens], natural
    target: Tensor  # float32 [num_tokens], the logit of the target
    best: Tensor  # int64 [num_tokens], the lowest id with the highest logit
    best_logit: Tensor  # float32 [num_tokens]


@dataclass(frozen=True, slots=True)
class Slices:
    """What each slice of the vocabulary finds for each token."""

    lse: Tensor  # float32 [num_slices, num_tokens]
    best: Tensor  # int32 [num_slices, num_tokens]
    best_logit: Tensor  # float32 [num_slices, num_tokens]
    target: Tensor  # float32 [num_tokens]

    def joined(self) -> LinearLse:
        best_logit = self.best_logit.amax(0)
        candidates = self.best.long().masked_fill(self.best_logit < best_logit, torch.iinfo(torch.int64).max)
        return LinearLse(self.lse.logsumexp(0), self.target, candidates.amin(0), best_logit)


@triton.jit
def linear_lse_kernel(
    hidden_ptr: tl.tensor,  # [num_tokens, SIZE], strided
    weight_ptr: tl.tensor,  # [vocab_size, SIZE], strided
    targets_ptr: tl.tensor,  # int64 [num_tokens]
    lse_ptr: tl.tensor,  # float32 [num_slices, num_tokens]
    best_ptr: tl.tensor,  # int32 [num_slices, num_tokens]
    best_logit_ptr: tl.tensor,  # float32 [num_slices, num_tokens]
    target_ptr: tl.tensor,  # float32 [num_tokens]
    num_tokens: tl.tensor,
    vocab_size: tl.tensor,
    slice_len: tl.tensor,
    softcap: tl.tensor,
    stride_hidden: tl.tensor,
    stride_weight: tl.tensor,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
) -> None:
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_token = token < num_tokens  # [ROWS]
    first = tl.program_id(1) * slice_len
    end = tl.minimum(first + slice_len, vocab_size)
    target = tl.load(targets_ptr + token, mask=is_token, other=-1)
    hidden_at = token.to(tl.int64) * stride_hidden
    best = tl.full([ROWS], float("-inf"), tl.float32)
    best_id = tl.zeros([ROWS], tl.int32)
    total = tl.zeros([ROWS], tl.float32)
    aimed = tl.zeros([ROWS], tl.float32)
    for start in range(first, end, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        is_column = column < end  # [COLUMNS]
        weight_at = column.to(tl.int64) * stride_weight
        logits = tl.zeros([ROWS, COLUMNS], tl.float32)
        for depth in range(0, SIZE, DEPTH):
            at = depth + tl.arange(0, DEPTH)
            h_mask = is_token[:, None] & (at < SIZE)[None, :]
            w_mask = is_column[None, :] & (at < SIZE)[:, None]
            h = tl.load(hidden_ptr + hidden_at[:, None] + at[None, :], mask=h_mask, other=0.0)  # [ROWS, DEPTH]
            w = tl.load(weight_ptr + weight_at[None, :] + at[:, None], mask=w_mask, other=0.0)  # [DEPTH, COLUMNS]
            logits = tl.dot(h, w, logits, input_precision="ieee")
        if HAS_SOFTCAP:
            logits = softcap * tanh(logits / softcap)
        logits = tl.where(is_column[None, :], logits, float("-inf"))
        aimed += tl.sum(tl.where(column[None, :] == target[:, None], logits, 0.0), 1)
        top = tl.max(logits, 1)
        at_top = tl.argmax(logits, 1)
        best_id = tl.where(top > best, start + at_top, best_id)
        highest = tl.maximum(best, top)
        total = total * tl.exp(best - highest) + tl.sum(tl.exp(logits - highest[:, None]), 1)
        best = highest
    out_at = tl.program_id(1).to(tl.int64) * num_tokens + token
    tl.store(lse_ptr + out_at, best + tl.log(total), mask=is_token)
    tl.store(best_ptr + out_at, best_id, mask=is_token)
    tl.store(best_logit_ptr + out_at, best, mask=is_token)
    tl.store(target_ptr + token, aimed, mask=is_token & (target >= first) & (target < end))


def linear_lse_launch(
    hidden: Tensor,  # [num_tokens, size], last stride 1
    weight: Tensor,  # [vocab_size, size], last stride 1
    targets: Tensor,  # int64 [num_tokens], within the vocabulary
    slices: Slices,
    softcap: float | None = None,
) -> Launch:
    """Fills `slices`; their number decides how much runs side by side, and nothing else."""
    num_tokens, size = hidden.shape
    vocab_size, num_slices = len(weight), len(slices.lse)
    slice_len = _slice_len(vocab_size, num_slices)
    assert -(-vocab_size // slice_len) == num_slices, f"{num_slices} slices of {vocab_size} leave some empty"
    assert weight.shape[1] == size, (weight.shape, hidden.shape)
    assert weight.dtype == hidden.dtype, (weight.dtype, hidden.dtype)
    assert hidden.stride(1) == weight.stride(1) == 1, (hidden.stride(), weight.stride())
    assert targets.shape == slices.target.shape == (num_tokens,), (targets.shape, slices.target.shape)
    assert targets.dtype == torch.int64, targets.dtype
    for one in (slices.lse, slices.best, slices.best_logit):
        assert one.shape == (num_slices, num_tokens), one.shape
        assert one.is_contiguous(), one.stride()
    return Launch(
        linear_lse_kernel,
        (-(-num_tokens // _ROWS), num_slices),
        {
            "hidden_ptr": hidden,
            "weight_ptr": weight,
            "targets_ptr": targets,
            "lse_ptr": slices.lse,
            "best_ptr": slices.best,
            "best_logit_ptr": slices.best_logit,
            "target_ptr": slices.target,
            "num_tokens": num_tokens,
            "vocab_size": vocab_size,
            "slice_len": slice_len,
            "softcap": float(softcap or 0.0),
            "stride_hidden": hidden.stride(0),
            "stride_weight": weight.stride(0),
        },
        {
            "SIZE": size,
            "ROWS": _ROWS,
            "COLUMNS": _COLUMNS,
            "DEPTH": _DEPTH,
            "HAS_SOFTCAP": softcap is not None,
        },
        num_warps=4,
        num_stages=3,
    )


def empty_slices(hidden: Tensor, vocab_size: int, num_slices: int) -> Slices:
    """At most `num_slices`, none of them empty."""
    num_slices = -(-vocab_size // _slice_len(vocab_size, num_slices))
    shape = num_slices, len(hidden)
    floats = [torch.empty(shape, dtype=torch.float32, device=hidden.device) for _ in range(2)]
    best = torch.empty(shape, dtype=torch.int32, device=hidden.device)
    return Slices(floats[0], best, floats[1], torch.empty(len(hidden), dtype=torch.float32, device=hidden.device))


def _slice_len(vocab_size: int, num_slices: int) -> int:
    """Whole tiles."""
    return -(-vocab_size // (num_slices * _COLUMNS)) * _COLUMNS
