"""Logits to tokens: temperature, min_p, top_k, top_p, then the largest of the scores with Gumbel noise added.

Noise is Philox of (seed; token, row, position): no state, so a draw depends on neither batch nor order. Nothing is
sorted: top_k and top_p are thresholds, found by bisection over the floats in their order; ties are kept.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchrun_kernels.triton.launch import Launch

_COLUMNS = 2048


@dataclass(frozen=True, slots=True)
class Draws:
    """One entry for each row of the logits, all [num_rows] and contiguous."""

    temperature: Tensor  # float32; 0: greedy
    min_p: Tensor  # float32; 0: off
    top_k: Tensor  # int32; 0: off
    top_p: Tensor  # float32; 1: off
    seed: Tensor  # int64
    row: Tensor  # int32, of the dataset
    position: Tensor  # int32, in the sequence, of the token drawn

    def check(self, num_rows: int) -> None:
        dtypes = {"seed": torch.int64, "top_k": torch.int32, "row": torch.int32, "position": torch.int32}
        for name in self.__slots__:
            one = getattr(self, name)
            assert one.shape == (num_rows,), (name, one.shape, num_rows)
            assert one.dtype == dtypes.get(name, torch.float32), (name, one.dtype)
            assert one.is_contiguous(), name


@triton.jit
def ordered(x: tl.tensor) -> tl.tensor:
    """int32 in the order of the float32s; the zeros are one."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def kept_above(
    logits_ptr: tl.tensor,
    threshold: tl.tensor,  # int32, of `ordered`
    best: tl.tensor,  # float32, the largest score
    inverse: tl.tensor,  # float32, of the temperature
    vocab_size: tl.tensor,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """How many scores reach the threshold, and their mass in units of the best one's."""
    count = 0
    mass = 0.0
    for start in range(0, vocab_size, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        score = tl.load(logits_ptr + column, mask=column < vocab_size, other=float("-inf")).to(tl.float32) * inverse
        kept = (column < vocab_size) & (ordered(score) >= threshold)
        count += tl.sum(kept.to(tl.int32), 0)
        mass += tl.sum(tl.where(kept, tl.exp(score - best), 0.0), 0)
    return count, mass


@triton.jit
def sample_kernel(
    logits_ptr: tl.tensor,  # [num_rows, vocab_size], strided
    temperature_ptr: tl.tensor,  # float32 [num_rows]
    min_p_ptr: tl.tensor,  # float32 [num_rows]
    top_k_ptr: tl.tensor,  # int32 [num_rows]
    top_p_ptr: tl.tensor,  # float32 [num_rows]
    seed_ptr: tl.tensor,  # int64 [num_rows]
    row_ptr: tl.tensor,  # int32 [num_rows]
    position_ptr: tl.tensor,  # int32 [num_rows]
    tokens_ptr: tl.tensor,  # int32 [num_rows]
    logprobs_ptr: tl.tensor,  # float32 [num_rows]
    vocab_size: tl.tensor,
    stride_logits: tl.tensor,
    COLUMNS: tl.constexpr,
) -> None:
    number = tl.program_id(0)
    logits_ptr += number.to(tl.int64) * stride_logits
    temperature = tl.load(temperature_ptr + number)
    is_greedy = temperature <= 0.0
    inverse = tl.where(is_greedy, 1.0, 1.0 / tl.where(is_greedy, 1.0, temperature))

    best = float("-inf")
    for start in range(0, vocab_size, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        logit = tl.load(logits_ptr + column, mask=column < vocab_size, other=float("-inf")).to(tl.float32)
        best = tl.maximum(best, tl.max(logit * inverse, 0))

    # The lowest score still in play, as an int32 in the order of the floats: raised by each rule that is on.
    min_p = tl.load(min_p_ptr + number)
    lowest = ordered(tl.where(min_p > 0.0, best + tl.log(tl.where(min_p > 0.0, min_p, 1.0)), float("-inf")))
    highest = ordered(best)
    top_k = tl.load(top_k_ptr + number)
    if (top_k > 0) & (top_k < vocab_size) & (temperature > 0.0):
        low = lowest.to(tl.int64)
        high = highest.to(tl.int64)
        while low < high:
            middle = (low + high + 1) >> 1
            count, _ = kept_above(logits_ptr, middle.to(tl.int32), best, inverse, vocab_size, COLUMNS)
            is_low = count >= top_k
            low = tl.where(is_low, middle, low)
            high = tl.where(is_low, high, middle - 1)
        lowest = low.to(tl.int32)
    top_p = tl.load(top_p_ptr + number)
    if (top_p < 1.0) & (temperature > 0.0):
        _, mass = kept_above(logits_ptr, lowest, best, inverse, vocab_size, COLUMNS)
        low = lowest.to(tl.int64)
        high = highest.to(tl.int64)
        while low < high:
            middle = (low + high + 1) >> 1
            _, reached = kept_above(logits_ptr, middle.to(tl.int32), best, inverse, vocab_size, COLUMNS)
            is_low = reached >= top_p * mass
            low = tl.where(is_low, middle, low)
            high = tl.where(is_low, high, middle - 1)
        lowest = low.to(tl.int32)

    seed = tl.load(seed_ptr + number)
    row = tl.load(row_ptr + number)
    position = tl.load(position_ptr + number)
    winner = float("-inf")
    token = 0
    chosen = 0.0
    total = 0.0
    for start in range(0, vocab_size, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        mask = column < vocab_size
        score = tl.load(logits_ptr + column, mask=mask, other=float("-inf")).to(tl.float32) * inverse
        # 0 times a column: whole counters, all of one shape.
        bits, _, _, _ = tl.philox(seed, column, row + 0 * column, position + 0 * column, 0 * column)
        # In (0, 1), 24 bits and a half: neither logarithm is of zero.
        uniform = ((bits >> 8).to(tl.float32) + 0.5) * (1.0 / 16777216.0)
        noise = tl.where(is_greedy, 0.0, -tl.log(-tl.log(uniform)))
        kept = mask & (ordered(score) >= lowest)
        noisy = tl.where(kept, score + noise, float("-inf"))
        at = tl.argmax(noisy, 0)
        top = tl.max(noisy, 0)
        is_better = top > winner
        at_winner = tl.sum(tl.where(column == start + at, score, 0.0), 0)
        token = tl.where(is_better, start + at, token)
        chosen = tl.where(is_better, at_winner, chosen)
        winner = tl.where(is_better, top, winner)
        total += tl.sum(tl.where(mask, tl.exp(score - best), 0.0), 0)
    tl.store(tokens_ptr + number, token)
    tl.store(logprobs_ptr + number, chosen - best - tl.log(total))


def sample_launch(
    logits: Tensor,  # [num_rows, vocab_size], last stride 1, finite or -inf; penalties already taken off
    draws: Draws,
    tokens: Tensor,  # int32 [num_rows]
    logprobs: Tensor,  # float32 [num_rows]
) -> Launch:
    """`tokens` becomes the drawn ones, `logprobs` their natural log-probabilities at the row's temperature.

    The log-probability is of the whole vocabulary, before min_p, top_k and top_p; greedy rows have temperature 1.
    """
    num_rows, vocab_size = logits.shape
    draws.check(num_rows)
    assert logits.stride(1) == 1, logits.stride()
    assert tokens.shape == logprobs.shape == (num_rows,), (tokens.shape, logprobs.shape)
    assert tokens.dtype == torch.int32, tokens.dtype
    assert logprobs.dtype == torch.float32, logprobs.dtype
    return Launch(
        sample_kernel,
        (num_rows,),
        {
            "logits_ptr": logits,
            **{f"{name}_ptr": getattr(draws, name) for name in draws.__slots__},
            "tokens_ptr": tokens,
            "logprobs_ptr": logprobs,
            "vocab_size": vocab_size,
            "stride_logits": logits.stride(0),
        },
        {"COLUMNS": _COLUMNS},
        num_warps=8,
    )
