"""The kernels beside attention at a model's shapes: blocks written and copied, norms, activations, the output layer."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import silu

from batchrun_kernels.contract import KVLayer
from batchrun_kernels.triton.activation import glu_launch
from batchrun_kernels.triton.bench.workload import Checked, Load, Size, Trial, Workload, compared
from batchrun_kernels.triton.copy_blocks import copy_blocks_launch
from batchrun_kernels.triton.head_major import HeadMajor
from batchrun_kernels.triton.linear_lse import empty_slices, linear_lse_launch
from batchrun_kernels.triton.norm import add_rms_norm_launch
from batchrun_kernels.triton.sample import Draws, sample_launch
from batchrun_kernels.triton.write_kv import Rotation, rope_launch

_EPS = 1e-5
_TOP_K = 50
_CHECKED_TOKENS = 64


def layer_workloads(size: Size, load: Load) -> Iterator[Workload]:
    for tokens in load.tokens:
        yield _write_kv(size, tokens)
        yield _rope(size, tokens)
        yield _norm(size, tokens)
        yield _activation(size, tokens)
    yield _copy_blocks(size, load.swapped)
    yield _sample(size, load.batch)
    yield _linear_lse(size, load.scored)


def _normal(*shape: int, size: Size, device: torch.device) -> Tensor:
    return torch.randn(shape, dtype=size.dtype, device=device)


def _write_kv(size: Size, tokens: int) -> Workload:
    def prepare(device: torch.device) -> Trial:
        layout = HeadMajor()
        num_blocks = -(-tokens // size.block_size) + 1
        key = _normal(tokens, size.kv_heads, size.head_dim, size=size, device=device)
        pool = layout.allocate(num_blocks, size.block_size, KVLayer(size.kv_heads, *[size.head_dim] * 2), key)
        slots = torch.randperm(num_blocks * size.block_size, device=device)[:tokens]

        def check() -> Checked:
            layout.write(pool, key, key, slots)
            got = torch.stack([one.transpose(1, 2).flatten(0, 1)[slots] for one in (pool.keys, pool.values)])
            return compared(got, torch.stack([key, key]), 0.0)

        return Trial(lambda: layout.write(pool, key, key, slots), check)

    return Workload("write_kv", f"{tokens} tokens", 2 * tokens * size.token_bytes, 0, prepare)


def _rope(size: Size, tokens: int) -> Workload:
    """Of the queries."""
    half = size.head_dim // 2

    def prepare(device: torch.device) -> Trial:
        x = _normal(tokens, size.heads, size.head_dim, size=size, device=device)
        angles = 6 * torch.rand(tokens, half, device=device)
        rotation = Rotation(angles.cos().to(size.dtype), angles.sin().to(size.dtype))
        out = torch.empty_like(x)
        launch = rope_launch(x, rotation, out)

        def check() -> Checked:
            launch.run()
            cos, sin = (one.float()[:, None] for one in (rotation.cos, rotation.sin))
            first, second = x.float().chunk(2, dim=-1)
            expected = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
            return compared(out, expected, size.tolerance)

        return Trial(launch.run, check)

    moved = 2 * tokens * (size.heads * size.head_dim + half) * size.dtype.itemsize
    return Workload("rope", f"{tokens} x {size.heads} heads of {size.head_dim}", moved, 0, prepare)


def _norm(size: Size, tokens: int) -> Workload:
    def prepare(device: torch.device) -> Trial:
        x, residual = _normal(2, tokens, size.hidden, size=size, device=device)
        weight = _normal(size.hidden, size=size, device=device)
        out, kept = torch.empty_like(x), residual.clone()
        launch = add_rms_norm_launch(x, residual, weight, out, _EPS)

        def check() -> Checked:
            residual.copy_(kept)
            launch.run()
            total = (x + kept).float()
            normed = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + _EPS)
            return compared(out, normed * weight.float(), size.tolerance)

        return Trial(launch.run, check)

    moved = 4 * tokens * size.hidden * size.dtype.itemsize
    return Workload("add_rms_norm", f"{tokens} x {size.hidden}", moved, 0, prepare)


def _activation(size: Size, tokens: int) -> Workload:
    def prepare(device: torch.device) -> Trial:
        gate_up = _normal(tokens, 2 * size.inner, size=size, device=device)
        out = torch.empty(tokens, size.inner, dtype=size.dtype, device=device)
        launch = glu_launch(gate_up, out, "silu")

        def check() -> Checked:
            launch.run()
            gate, up = gate_up.float().chunk(2, dim=1)
            return compared(out, silu(gate) * up, size.tolerance)

        return Trial(launch.run, check)

    moved = 3 * tokens * size.inner * size.dtype.itemsize
    return Workload("glu", f"{tokens} x {size.inner}", moved, 0, prepare)


def _copy_blocks(size: Size, tokens: int) -> Workload:
    """A sequence's keys, of all layers, to staging."""
    num_blocks = -(-tokens // size.block_size)

    def prepare(device: torch.device) -> Trial:
        block = (size.kv_heads, size.block_size, size.head_dim)
        pool = _normal(size.num_layers, 2 * num_blocks, *block, size=size, device=device)
        staging = torch.empty(size.num_layers, num_blocks, *block, dtype=size.dtype, device=device)
        ids = torch.randperm(2 * num_blocks, device=device)[:num_blocks].int()
        launch = copy_blocks_launch(pool, staging, ids, None)

        def check() -> Checked:
            launch.run()
            return compared(staging, pool[:, ids.long()], 0.0)

        return Trial(launch.run, check)

    moved = num_blocks * size.block_size * size.num_layers * size.token_bytes
    return Workload("copy_blocks", f"{num_blocks} blocks of {size.num_layers} layers", moved, 0, prepare)


def _sample(size: Size, rows: int) -> Workload:
    """Every second row is greedy, the others have top_k and top_p."""

    def prepare(device: torch.device) -> Trial:
        logits = _normal(rows, size.vocab, size=size, device=device)
        at = torch.arange(rows, device=device)
        is_greedy = at % 2 == 0
        draws = Draws(
            temperature=torch.where(is_greedy, 0.0, 0.8),
            min_p=torch.zeros(rows, device=device),
            top_k=torch.full((rows,), _TOP_K, dtype=torch.int32, device=device),
            top_p=torch.full((rows,), 0.9, device=device),
            seed=at,
            row=at.int(),
            position=at.int(),
        )
        tokens, logprobs = torch.empty_like(draws.row), torch.empty_like(draws.top_p)
        launch = sample_launch(logits, draws, tokens, logprobs)

        def check() -> Checked:
            """By how much the drawn tokens' logits are below the lowest that may be drawn."""
            launch.run()
            best = logits.float().topk(_TOP_K).values
            lowest = torch.where(is_greedy, best[:, 0], best[:, -1])
            drawn = logits.float().gather(1, tokens.long()[:, None])[:, 0]
            return Checked(float((lowest - drawn).clamp_min(0).max()), 0.0)

        return Trial(launch.run, check)

    moved = rows * size.vocab * size.dtype.itemsize
    return Workload("sample", f"{rows} x {size.vocab}, half top_k and top_p", moved, 0, prepare)


def _linear_lse(size: Size, tokens: int) -> Workload:
    def prepare(device: torch.device) -> Trial:
        hidden = _normal(tokens, size.hidden, size=size, device=device)
        weight = _normal(size.vocab, size.hidden, size=size, device=device) * size.hidden**-0.5
        targets = torch.randint(size.vocab, (tokens,), device=device)
        slices = empty_slices(hidden, size.vocab, 8)
        launch = linear_lse_launch(hidden, weight, targets, slices)

        def check() -> Checked:
            launch.run()
            found = slices.joined()
            logits = hidden[:_CHECKED_TOKENS].float() @ weight.float().T
            aimed = logits.gather(1, targets[:_CHECKED_TOKENS, None])[:, 0]
            got = torch.stack([found.lse, found.target, found.best_logit])[:, :_CHECKED_TOKENS]
            # Products of 16-bit numbers are exact in float32, whatever the dtype; sums run in another order.
            return compared(got, torch.stack([logits.logsumexp(-1), aimed, logits.amax(-1)]), 1e-4)

        return Trial(launch.run, check)

    moved = (tokens + size.vocab) * size.hidden * size.dtype.itemsize
    flops = 2 * tokens * size.hidden * size.vocab
    return Workload("linear_lse", f"{tokens} x {size.hidden} x {size.vocab}", moved, flops, prepare)
