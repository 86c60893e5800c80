"""Copied blocks are the same bits, in every layer, and no other block changes."""

import math

import pytest
import torch

from batchrun_kernels.triton.copy_blocks import copy_blocks_launch

LAYERS, BLOCKS, BLOCK = 3, 9, (4, 3, 86)  # 1,032 words of two halves are one word more than a program copies


def make_pool(device: torch.device) -> torch.Tensor:
    """bfloat16 [LAYERS, BLOCKS, ...], with a NaN in every block; layers interleaved in memory."""
    pool = torch.randn(BLOCKS, LAYERS, *BLOCK, 2, generator=torch.Generator().manual_seed(0)).bfloat16()
    pool[..., 5, 0] = math.nan
    return pool.to(device).transpose(0, 1)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int16)


@pytest.fixture
def ids(device: torch.device) -> torch.Tensor:
    return torch.tensor([7, 0, -1, 4], dtype=torch.int32, device=device)


def test_blocks_go_to_staging_and_come_back_elsewhere(device: torch.device, ids: torch.Tensor) -> None:
    pool = make_pool(device)
    staging = torch.zeros(4, LAYERS, *BLOCK, 2, dtype=torch.bfloat16, device=device).transpose(0, 1)
    copy_blocks_launch(pool, staging, ids, None).run()
    expected = torch.zeros_like(staging)
    expected[:, [0, 1, 3]] = pool[:, [7, 0, 4]]
    assert torch.equal(bits(staging), bits(expected))
    other = torch.zeros_like(pool)
    targets = torch.tensor([2, 8, 1, -1], dtype=torch.int32, device=device)
    copy_blocks_launch(staging, other, None, targets).run()
    expected = torch.zeros_like(pool)
    expected[:, [2, 8, 1]] = staging[:, [0, 1, 2]]
    assert torch.equal(bits(other), bits(expected))


def test_blocks_are_copied_within_a_pool(device: torch.device, ids: torch.Tensor) -> None:
    pool = make_pool(device)
    expected = pool.clone()
    expected[:, [1, 2, 3]] = pool[:, [7, 0, 4]]
    copy_blocks_launch(pool, pool, ids, torch.tensor([1, 2, 5, 3], dtype=torch.int32, device=device)).run()
    assert torch.equal(bits(pool), bits(expected))


def test_blocks_that_are_not_contiguous_are_refused(ids: torch.Tensor, device: torch.device) -> None:
    pool = make_pool(device)
    with pytest.raises(AssertionError, match="contiguous"):
        copy_blocks_launch(pool.transpose(2, 3), pool.transpose(2, 3), ids, None)
