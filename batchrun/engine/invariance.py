"""The proof, at load, that a row's logits come from the row alone, to the bit: what `--deterministic` promises.

Two parts. Everything that torch computes in a step is listed, operation by operation: it may move numbers, or compute
each from one place of its inputs by a rounding that is fixed. A sum of torch's may be taken in an order that the rows
beside decide, and some of its functions round differently at the end of a thread's share. All else is done by kernels
whose bits are their row's by construction. Then some rows are computed alone, together and in other pieces.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from batchrun.engine.attention import run_packed
from batchrun.engine.batch import pack
from batchrun.engine.kv_cache import KVCache
from batchrun.engine.request import Request, SamplingParams
from batchrun.engine.self_check import Expected
from batchrun.engine.sequence import Sequence
from batchrun.engine.step import Item, ScheduledBatch
from batchrun.errors import ModelUnavailable
from batchrun_kernels import Attention, native

_BLOCK_SIZE = 16
_LENGTHS = (3, 37, 90)
# Steps as the tokens that each of the sequences computes in them: alone, together, and cut in many ways.
_ALONE = ((3, 0, 0), (0, 37, 0), (0, 0, 90))
_TOGETHER = ((3, 37, 90),)
_CUT = ((1, 20, 1), (1, 1, 63), (0, 13, 1), (1, 1, 20), (0, 2, 5))

_MOVES = frozenset({
    "alias", "arange", "cat", "chunk", "clone", "concat", "contiguous", "copy_", "detach", "detach_", "dropout",
    "embedding", "empty", "empty_like", "expand", "flatten", "full_like", "gather", "index", "index_select",
    "lift_fresh", "masked_fill", "new_empty", "ones", "ones_like", "permute", "repeat", "repeat_interleave",
    "reshape", "select", "slice", "split", "split_with_sizes", "squeeze", "stack", "to", "transpose", "type_as",
    "unbind", "unflatten", "unsqueeze", "view", "where", "zeros", "zeros_like",
})  # fmt: skip
_ROUNDED_ONE_WAY = frozenset({
    "abs", "add", "add_", "bitwise_not", "clamp", "div", "div_", "eq", "floor_divide", "ge", "gt", "logical_and",
    "lt", "min", "mul", "mul_", "multiply", "neg", "relu", "remainder", "sqrt", "square", "sub",
})  # fmt: skip
# Whether an element's bits depend on its place is the build's business, so it is asked.
_ASKED = {"cos": torch.cos, "sin": torch.sin, "tanh": torch.tanh}


def require_fixed_kernels(device: torch.device, dtype: torch.dtype) -> None:
    """Raises ModelUnavailable when a model on this device and in this dtype could not pass, whatever it computes."""
    if device.type != "cpu":
        raise ModelUnavailable(
            f"--deterministic is for a CPU: on {device} the rounding of a matrix product depends on the rows beside; "
            "use --device cpu, or leave it out"
        )
    if dtype != torch.float32:
        given = str(dtype).removeprefix("torch.")
        raise ModelUnavailable(f"--deterministic needs --dtype float32, not {given}: torch multiplies in halves")
    if (problem := native.problem()) is not None:
        raise ModelUnavailable(f"--deterministic needs the C kernels, but {problem}")


@torch.inference_mode()
def prove_invariance(module: Any, expected: Expected, attention: Attention, kv_place: Tensor) -> None:
    """`module` passed the check against `expected` with `attention`; keys and values are kept as `kv_place` is.

    Raises ModelUnavailable, saying what stands in the way, when a row's bits may depend on what is computed beside it.
    """

    def logits(steps: tuple[tuple[int, ...], ...]) -> Tensor:
        return _logits(module, attention, kv_place, expected.vocab_size, steps)

    with _Listening() as heard:
        together = logits(_TOGETHER)
    if unknown := sorted(name for name in heard.names if not _is_fixed(name)):
        raise ModelUnavailable(
            f"{expected.name} leaves {', '.join(unknown)} to torch, whose rounding can depend on the rows beside; "
            "leave out --deterministic"
        )
    if not all(torch.equal(logits(steps), together) for steps in (_ALONE, _CUT)):
        raise ModelUnavailable(f"{expected.name} gives a row other logits beside other rows; leave out --deterministic")


class _Listening(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the names of torch's operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def _is_fixed(op: str) -> bool:
    return op in _MOVES or op in _ROUNDED_ONE_WAY or (op in _ASKED and _is_the_same_anywhere(op))


def _is_the_same_anywhere(op: str) -> bool:
    """Whether the operation rounds a number alike at the beginning, in the middle and at the end of any tensor."""
    function, numbers = _ASKED[op], torch.rand(70_003, generator=torch.Generator().manual_seed(1)) * 40
    whole = function(numbers)
    spans = ((begin, begin + length) for begin in (0, 5, 33, 30_001) for length in (1, 7, 17, 64, 1001, 40_002))
    return all(torch.equal(function(numbers[begin:end].clone()), whole[begin:end]) for begin, end in spans)


def _logits(
    module: Any, attention: Attention, kv_place: Tensor, vocab_size: int, steps: tuple[tuple[int, ...], ...]
) -> Tensor:
    """[tokens of all sequences, vocab], sequence by sequence, from the steps one after another."""
    sequences = list(_sequences(vocab_size))
    cache = KVCache(sum(len(one.block_table) for one in sequences), _BLOCK_SIZE, attention, kv_place)
    parts: list[list[Tensor]] = [[] for _ in sequences]
    for counts in steps:
        chosen = [(number, count) for number, count in enumerate(counts) if count]
        items = tuple(Item(sequences[number], sequences[number].num_computed, count, True) for number, count in chosen)
        batch = pack(ScheduledBatch(items), _BLOCK_SIZE, kv_place.device)
        batch = replace(batch, sampled=torch.arange(batch.input_ids.shape[1]))
        logits = run_packed(module, batch, cache, attention.plan(batch.work))
        for (number, count), part in zip(chosen, torch.split(logits, [count for _, count in chosen]), strict=True):
            parts[number].append(part)
            sequences[number].num_computed += count
    return torch.cat([part for own in parts for part in own])


def _sequences(vocab_size: int) -> Iterator[Sequence]:
    random, first = np.random.default_rng(3), 0
    for row, length in enumerate(_LENGTHS):
        ids = random.integers(0, vocab_size, length, dtype=np.int32)
        sequence = Sequence(Request(row, ids, SamplingParams(max_tokens=1)), arrival=row)
        num_blocks = -(-length // _BLOCK_SIZE)
        sequence.block_table = list(range(first, first + num_blocks))
        first += num_blocks
        yield sequence
