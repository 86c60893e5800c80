"""Writing keys and values: the slots named become what torch computes, and nothing else of the pool changes."""

import math

import pytest
import torch
from torch import Tensor

from batchrun_kernels.triton.pool import Pool
from batchrun_kernels.triton.write_kv import Rotation, rope_launch, write_kv_launch
from tests.kernels.interpreted.steps import skip_without

TOKENS, KV_HEADS, HEAD_DIM, VALUE_DIM, BLOCKS, BLOCK = 7, 5, 24, 10, 6, 4
# Scattered; one token pads the batch.
SLOTS = torch.tensor([3, 22, 0, -1, 9, 10, 17])
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def inputs(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Rotation]:
    """k and v as views of one fused row; a rotation of 18 of the 24 dimensions."""
    random = torch.Generator().manual_seed(0)
    fused = torch.randn(TOKENS, KV_HEADS * (HEAD_DIM + VALUE_DIM), generator=random).to(dtype).to(device)
    k, v = fused.split([KV_HEADS * HEAD_DIM, KV_HEADS * VALUE_DIM], dim=1)
    angles = torch.rand(TOKENS, 9, generator=random).to(device) * 6
    rotation = Rotation(angles.cos().to(dtype), angles.sin().to(dtype))
    return k.unflatten(1, (KV_HEADS, HEAD_DIM)), v.unflatten(1, (KV_HEADS, VALUE_DIM)), rotation


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """As `apply_rotary_pos_emb`, in x's dtype, on the leading dimensions."""
    cos, sin = (torch.cat([one, one], dim=-1)[:, None] for one in (rotation.cos, rotation.sin))
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    return torch.cat([turned * cos + torch.cat([-second, first], dim=-1) * sin, rest], dim=-1)


def assert_same(got: Tensor, expected: Tensor, device: torch.device) -> None:
    """Bit by bit; a compiler makes one rounding of a float32's product and sum, where they are below 8."""
    atol = 2**-21 if expected.dtype == torch.float32 and device.type == "cuda" else 0.0
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)


def empty_pool(dtype: torch.dtype, device: torch.device) -> Pool:
    """Head-major memory behind the contract's shape; NaN, or 77 where there is none."""

    def blank(dim: int) -> Tensor:
        return torch.full((BLOCKS, KV_HEADS, BLOCK, dim), math.nan).nan_to_num(77 if dtype == torch.int8 else math.nan)

    keys, values = (blank(dim).to(dtype).to(device).transpose(1, 2) for dim in (HEAD_DIM, VALUE_DIM))
    if dtype.itemsize > 1:
        return Pool(keys, values)
    scales = torch.full((2, BLOCKS, BLOCK, KV_HEADS), math.nan, device=device)
    return Pool(keys, values, scales[0], scales[1])


def written(pool: Tensor) -> Tensor:
    """[num_tokens that do not pad, kv_heads, ...]; checks that the other slots are as they were."""
    flat = pool.cpu().flatten(0, 1)
    at = SLOTS[SLOTS >= 0]
    untouched = torch.ones(len(flat), dtype=torch.bool)
    untouched[at] = False
    rest = flat[untouched].float()
    assert rest.isnan().all() or (rest == 77).all()
    return flat[at]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("turns", [False, True])
def test_keys_are_rotated_and_written_to_the_bit(device: torch.device, dtype: torch.dtype, turns: bool) -> None:
    k, v, rotation = inputs(dtype, device)
    pool = empty_pool(dtype, device)
    write_kv_launch(k, v, pool, SLOTS.to(device), rotation if turns else None).run()
    expected = rotate(k, rotation) if turns else k
    assert_same(written(pool.keys), expected.cpu()[SLOTS >= 0], device)
    assert torch.equal(written(pool.values), v.cpu()[SLOTS >= 0])


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_quantised_pool_gets_codes_and_scales(device: torch.device, dtype: torch.dtype) -> None:
    skip_without(dtype, device)
    k, v, rotation = inputs(torch.float32, device)
    k[1, 2] = 0
    pool = empty_pool(dtype, device)
    write_kv_launch(k, v, pool, SLOTS.to(device), rotation).run()
    most = 127 if dtype == torch.int8 else 448
    for x, codes, scales in ((rotate(k, rotation), pool.keys, pool.key_scales), (v, pool.values, pool.value_scales)):
        assert scales is not None
        x = x.cpu()[SLOTS >= 0]
        largest = x.abs().amax(-1)
        expected = torch.where(largest > 0, largest / most, 1.0)
        torch.testing.assert_close(written(scales), expected, rtol=1e-6, atol=0)
        scaled = x / written(scales)[..., None]
        rounded = (scaled + 0.5).floor() if dtype == torch.int8 else scaled.clamp(-448, 448).to(dtype).float()
        assert torch.equal(written(codes).float(), rounded)


@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_are_rotated_to_the_bit(device: torch.device, dtype: torch.dtype) -> None:
    q, _, rotation = inputs(dtype, device)
    out = torch.full(q.shape, math.nan, dtype=dtype, device=device)
    rope_launch(q, rotation, out).run()
    assert_same(out, rotate(q, rotation), device)
