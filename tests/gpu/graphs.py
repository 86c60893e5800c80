"""A step captured once and replayed for other steps of its buckets gives the same bits as those steps by themselves."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from batchrun_kernels import KVLayer, KVPool, Mask, Work
from batchrun_kernels.triton.attention import TritonAttention, TritonPlan
from tests.gpu.part import Machine, Part, Result, attempt

_HEADS, _KV_HEADS, _DIM, _BLOCK = 8, 2, 64, 16
_ROWS = 8
# (q_len, kv_len) of each sequence; all steps fall into the same buckets. On a CPU the first two.
_STEPS = (
    ((1, 560), (1, 17)),
    ((1, 561), (1, 18), (1, 34), (1, 9)),
    ((1, 600), (1, 1), (1, 90)),
    ((1, 530), (5, 70)),
    ((1, 65),) * 8,
)
_MASKS = (Mask(0.2), Mask(0.2, window=20))


@dataclass(frozen=True, slots=True)
class _Memory:
    """What a graph reads and writes, at the same addresses for every step."""

    q: Tensor  # [_ROWS, heads, dim]
    key: Tensor  # [_ROWS, kv_heads, dim]
    slots: Tensor  # int64 [_ROWS]
    pool: KVPool


def plan() -> Iterator[str]:
    yield (
        f"capture write_kv and attention of two layers for {_ROWS} padded rows, {_HEADS} heads over {_KV_HEADS} of "
        f"{_DIM}; refill the plan for each of {len(_STEPS) - 1} other steps, with blocks in runs and without, replay, "
        "compare the bits with a step alone"
    )


def run(machine: Machine) -> Iterator[Result]:
    dtypes = (torch.bfloat16, torch.float32) if machine.is_gpu else (torch.float32,)
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        yield attempt("graphs", name, lambda one=dtype, named=name: _replay(one, named, machine))  # type: ignore[misc]


def _replay(dtype: torch.dtype, name: str, machine: Machine) -> Result:
    attention = TritonAttention(machine.device)
    memory = _memory(dtype, machine.device)
    chosen = _STEPS if machine.is_gpu else _STEPS[:2]
    steps = [_work(lens, backwards=number % 2 == 1) for number, lens in enumerate(chosen)]
    _forward(attention, memory, attention.plan(steps[0]))
    plan = attention.plan(steps[0])
    graph, outs = _capture(attention, memory, plan)
    unequal = []
    for number, work in enumerate(steps):
        fresh = attention.plan(work)
        if fresh.shape != plan.shape:
            return Result("graphs", name, False, f"step {number} does not fall into the buckets of the first")
        _next_step(memory, work)
        alone = _forward(attention, memory, fresh)
        plan.refill(fresh)
        if graph is not None:
            graph.replay()
        else:
            outs = _forward(attention, memory, plan)
        num_tokens = sum(work.q_lens)
        same = all(torch.equal(one, other) for one, other in zip(alone, outs, strict=True))
        if not same or any(out[num_tokens:].any() for out in outs):
            unequal.append(number)
    how = "replayed from one graph" if graph is not None else "refilled, without a graph"
    return Result("graphs", name, not unequal, f"{len(steps)} steps {how}; those that differ: {unequal or 'none'}")


def _capture(
    attention: TritonAttention, memory: _Memory, plan: TritonPlan
) -> tuple[torch.cuda.CUDAGraph | None, list[Tensor]]:
    if not memory.q.is_cuda:
        return None, []
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = _forward(attention, memory, plan)
    return graph, outs


def _forward(attention: TritonAttention, memory: _Memory, plan: TritonPlan) -> list[Tensor]:
    attention.layout.write(memory.pool, memory.key, memory.key, memory.slots)
    return [attention.attend(memory.q, memory.pool.keys, memory.pool.values, plan, mask) for mask in _MASKS]


def _memory(dtype: torch.dtype, device: torch.device) -> _Memory:
    torch.manual_seed(0)
    place = torch.zeros((), dtype=dtype, device=device)
    pool = TritonAttention(device).layout.allocate(64, _BLOCK, KVLayer(_KV_HEADS, _DIM, _DIM), place)
    pool.keys.normal_()
    pool.values.normal_()
    q = torch.randn(_ROWS, _HEADS, _DIM, dtype=dtype, device=device)
    key = torch.randn(_ROWS, _KV_HEADS, _DIM, dtype=dtype, device=device)
    return _Memory(q, key, torch.zeros(_ROWS, dtype=torch.int64, device=device), pool)


def _work(lens: tuple[tuple[int, int], ...], *, backwards: bool) -> Work:
    """Block 0 is nobody's: padding is written there. Other blocks are consecutive, or each behind the next."""
    needed = [-(-kv_len // _BLOCK) for _, kv_len in lens]
    table = torch.zeros(len(lens), max(needed), dtype=torch.int32)
    free = iter(range(63, 0, -1) if backwards else range(1, 64))
    for row, num in enumerate(needed):
        table[row, :num] = torch.tensor([next(free) for _ in range(num)])
    return Work(tuple(q_len for q_len, _ in lens), tuple(kv_len for _, kv_len in lens), table, _BLOCK)


def _next_step(memory: _Memory, work: Work) -> None:
    """Other queries and keys, in place; rows behind the work are NaN."""
    slots = []
    for item, (q_len, kv_len) in enumerate(zip(work.q_lens, work.kv_lens, strict=True)):
        for position in range(kv_len - q_len, kv_len):
            slots.append(int(work.block_table[item, position // _BLOCK]) * _BLOCK + position % _BLOCK)
    padding = _ROWS - len(slots)
    memory.q.normal_()
    memory.key.normal_()
    memory.q[len(slots) :] = torch.nan
    memory.key[len(slots) :] = torch.nan
    memory.slots.copy_(torch.tensor(slots + [0] * padding))


PART = Part("graphs", "captured steps, refilled and replayed", 40, plan, run)
