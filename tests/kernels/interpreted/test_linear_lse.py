"""The output layer in slices equals the one that makes all logits."""

import math

import pytest
import torch
from torch import Tensor

from batchrun_kernels.triton.linear_lse import LinearLse, Slices, empty_slices, linear_lse_launch

TOKENS, SIZE, VOCAB = 67, 70, 300


def inputs(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Columns of wider matrices that are NaN beyond them; token 3 has its best logit at two ids, in two tiles.

    Small multiples of 1/8, so that every sum is exact in any order and ties are ties.
    """
    random = torch.Generator().manual_seed(0)
    hidden = torch.randint(-2, 3, (TOKENS, SIZE), generator=random).float()
    weight = torch.randint(-4, 5, (VOCAB, SIZE), generator=random) / 8
    weight[[50, 251]] = hidden[3] / 2
    targets = torch.randint(VOCAB, (TOKENS,), generator=random)
    targets[0], targets[1] = 0, VOCAB - 1
    return _strided(hidden.to(dtype).to(device)), _strided(weight.to(dtype).to(device)), targets.to(device)


def _strided(x: Tensor) -> Tensor:
    return torch.cat([x, torch.full_like(x[:, :10], math.nan)], dim=1)[:, : x.shape[1]]


def run(hidden: Tensor, weight: Tensor, targets: Tensor, num_slices: int, softcap: float | None) -> LinearLse:
    slices: Slices = empty_slices(hidden, VOCAB, num_slices)
    for one in (slices.lse, slices.best_logit, slices.target):
        one.fill_(math.nan)
    linear_lse_launch(hidden, weight, targets, slices, softcap).run()
    return slices.joined()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_slices", "softcap"), [(1, None), (3, None), (64, 30.0)])
def test_linear_lse(device: torch.device, dtype: torch.dtype, num_slices: int, softcap: float | None) -> None:
    hidden, weight, targets = inputs(dtype, device)
    got = run(hidden, weight, targets, num_slices, softcap)
    logits = hidden.double() @ weight.double().T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    # float32 sums of 300 exponentials.
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(got.lse.double(), logits.logsumexp(-1), **close)
    torch.testing.assert_close(got.target.double(), logits.gather(1, targets[:, None])[:, 0], **close)
    torch.testing.assert_close(got.best_logit.double(), logits.amax(-1), **close)
    assert torch.equal(got.best, logits.argmax(-1))
    assert got.best[3] == 50
