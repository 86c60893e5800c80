"""Sampling equals a slow sampler that sorts, with Philox written out in numpy."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchrun_kernels.triton.sample import Draws, sample_launch

# More than the 2,048 columns of a program's loop.
VOCAB = 2100
MASK = np.uint64(0xFFFFFFFF)


def philox(counter: list[NDArray[np.uint64]], seed: int) -> NDArray[np.uint64]:
    """The first of the four words of Philox4x32-10."""
    c0, c1, c2, c3 = counter
    k0, k1 = np.uint64(seed & 0xFFFFFFFF), np.uint64((seed >> 32) & 0xFFFFFFFF)
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (b >> np.uint64(32)) ^ c1 ^ k0, b & MASK, (a >> np.uint64(32)) ^ c3 ^ k1, a & MASK
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & MASK, (k1 + np.uint64(0xBB67AE85)) & MASK
    return c0


def gumbel(seed: int, row: int, position: int) -> NDArray[np.float64]:
    columns = np.arange(VOCAB, dtype=np.uint64)
    words = philox([columns, *(np.full_like(columns, one) for one in (row, position, 0))], seed)
    return -np.log(-np.log(((words >> np.uint64(8)) + 0.5) / 2**24))


def slow(logits: Tensor, draws: Draws) -> tuple[list[int], list[float]]:
    """Sorts, row by row, in float64."""
    tokens, logprobs = [], []
    for at, line in enumerate(logits.double().cpu()):
        names = ("temperature", "min_p", "top_p", "top_k", "seed", "row", "position")
        temperature, min_p, top_p, top_k, seed, row, position = (getattr(draws, name)[at].item() for name in names)
        scores = line / temperature if temperature else line
        kept = scores.clone()
        if temperature:
            if min_p:
                kept[scores < scores.max() + math.log(min_p)] = -math.inf
            if top_k:
                kept[scores < kept.sort(descending=True).values[top_k - 1]] = -math.inf
            if top_p < 1:
                values = kept.sort(descending=True).values
                reached = values.softmax(0).cumsum(0)
                kept[scores < values[int((reached < top_p).sum())]] = -math.inf
            kept += torch.from_numpy(gumbel(int(seed), int(row), int(position)))
        tokens.append(int(kept.argmax()))
        logprobs.append(float(scores.log_softmax(0)[tokens[-1]]))
    return tokens, logprobs


def make_draws(num_rows: int, device: torch.device, **changes: float) -> Draws:
    at = torch.arange(num_rows, device=device)
    off: dict[str, float] = {"temperature": 0.8, "min_p": 0.0, "top_k": 0, "top_p": 1.0} | changes
    return Draws(
        *(torch.full((num_rows,), off[name], device=device) for name in ("temperature", "min_p")),
        torch.full((num_rows,), int(off["top_k"]), dtype=torch.int32, device=device),
        torch.full((num_rows,), off["top_p"], device=device),
        at * (2**33 + 7) + 5,
        (at * 3 + 1).int(),
        (at * 11).int(),
    )


def run(logits: Tensor, draws: Draws) -> tuple[list[int], Tensor]:
    tokens = torch.full((len(logits),), -1, dtype=torch.int32, device=logits.device)
    logprobs = torch.full((len(logits),), math.nan, device=logits.device)
    sample_launch(logits, draws, tokens, logprobs).run()
    return tokens.tolist(), logprobs.cpu()


def make_logits(num_rows: int, device: torch.device) -> Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(1)).mul(3).to(device)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.0, "top_k": 3, "top_p": 0.5, "min_p": 0.5},
        {"min_p": 0.2},
        {"top_k": 5},
        {"top_p": 0.6},
        {"temperature": 1.7, "min_p": 0.01, "top_k": 40, "top_p": 0.8},
    ],
    ids=str,
)
def test_draws_equal_a_sampler_that_sorts(device: torch.device, changes: dict[str, float]) -> None:
    logits, draws = make_logits(3, device), make_draws(3, device, **changes)
    tokens, logprobs = run(logits, draws)
    expected, expected_logprobs = slow(logits, draws)
    assert tokens == expected
    # float32 sums of 2,100 terms.
    torch.testing.assert_close(logprobs, torch.tensor(expected_logprobs), rtol=1e-5, atol=1e-5)


def test_a_draw_depends_on_its_own_row_only(device: torch.device) -> None:
    logits, draws = make_logits(4, device).bfloat16(), make_draws(4, device, top_k=50, top_p=0.9)
    together, _ = run(logits, draws)
    picked = [2, 0]
    fewer = replace(draws, **{name: getattr(draws, name)[picked].contiguous() for name in draws.__slots__})
    assert run(logits[picked], fewer)[0] == [together[at] for at in picked]


def test_ties_and_minus_infinity(device: torch.device) -> None:
    """The first of equal logits wins when greedy; what is ruled out is never drawn."""
    logits = torch.full((3, VOCAB), -math.inf, device=device)
    logits[:, [7, 2050, 2060]] = 1.5
    tokens, logprobs = run(logits, make_draws(3, device, temperature=0.0))
    assert tokens == [7, 7, 7]
    torch.testing.assert_close(logprobs, torch.full((3,), -math.log(3)))
    assert set(run(logits, make_draws(3, device, top_k=1, top_p=0.2))[0]) <= {7, 2050, 2060}
