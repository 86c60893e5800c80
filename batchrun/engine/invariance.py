"""The proof, at load, that a row's logits come from the row alone, to the bit: what `--deterministic` promises.

Two parts. Everything that torch computes in a step is listed, operation by operation: it may move numbers, or compute
each from one place of its inputs by a rounding that is fixed. A sum of torch's may be taken in an order that the rows
beside decide, and some of its functions round differently at the end of a thread's share. All else is done by kernels
whose bits are their row's by construction. Then some rows are computed alone, together, in other pieces, and over
blocks that they share.
"""

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

Steps = tuple[tuple[int, ...], ...]

_BLOCK_SIZE = 16
_LENGTHS = (3, 37, 90)
# Further rows begin as the last of these does, for more than a tile of attention, and have so many tokens of their own.
_SHARED_LEN, _TAILS = 80, (1, 7)
# Steps as the tokens that each of the rows computes in them: alone, together, and cut in many ways.
_ALONE = ((3, 0, 0, 0, 0), (0, 37, 0, 0, 0), (0, 0, 90, 0, 0), (0, 0, 0, 81, 0), (0, 0, 0, 0, 87))
_TOGETHER = ((3, 37, 90, 81, 87),)
_CUT = ((1, 20, 1, 80, 1), (1, 1, 63, 0, 63), (0, 13, 1, 1, 1), (1, 1, 20, 0, 20), (0, 2, 5, 0, 2))

_MOVES = frozenset({
    "alias", "arange", "cat", "chunk", "clone", "concat", "contiguous", "copy_", "detach", "detach_", "dropout",
    "embedding", "empty", "empty_like", "expand", "flatten", "full_like", "gather", "index", "index_put_",
    "index_select", "lift_fresh", "masked_fill", "new_empty", "ones", "ones_like", "permute", "repeat",
    "repeat_interleave", "reshape", "resolve_conj", "resolve_neg", "select", "slice", "split", "split_with_sizes",
    "squeeze", "stack", "to", "transpose", "type_as", "unbind", "unflatten", "unsqueeze", "view", "where", "zeros",
    "zeros_like",
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

    def logits(rows: list[Sequence], steps: Steps) -> list[Tensor]:
        return _logits(module, attention, kv_place, rows, steps)

    vocab_size = expected.vocab_size
    with _Listening() as heard:
        together = logits(_rows(vocab_size), _TOGETHER)
    if unknown := sorted(name for name in heard.names if not _is_fixed(name)):
        raise ModelUnavailable(
            f"{expected.name} leaves {', '.join(unknown)} to torch, whose rounding can depend on the rows beside; "
            "leave out --deterministic"
        )
    for steps in (_ALONE, _CUT):
        _require_equal(expected.name, logits(_rows(vocab_size), steps), together)
    num_copies, num_plain = _copies_for_teams(), len(_LENGTHS)
    in_teams = logits(_rows(vocab_size, num_copies, shares_blocks=True), _steps_of_teams(num_copies))
    _require_equal(expected.name, in_teams, together[:num_plain] + together[num_plain:] * num_copies)


def _require_equal(name: str, found: list[Tensor], together: list[Tensor]) -> None:
    if not all(torch.equal(one, other) for one, other in zip(found, together, strict=True)):
        raise ModelUnavailable(f"{name} gives a row other logits beside other rows; leave out --deterministic")


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


def _logits(module: Any, attention: Attention, kv_place: Tensor, rows: list[Sequence], steps: Steps) -> list[Tensor]:
    """[tokens, vocab] of each row, from the steps one after another; of those that begin as another, their own tokens.

    So they have as many as they would, had they computed what they share or not.
    """
    cache = KVCache(1 + max(max(row.block_table) for row in rows), _BLOCK_SIZE, attention, kv_place)
    parts: list[list[Tensor]] = [[] for _ in rows]
    for counts in steps:
        chosen = [number for number, count in enumerate(counts) if count]
        items = tuple(Item(rows[number], rows[number].num_computed, counts[number], True) for number in chosen)
        batch = pack(ScheduledBatch(items), _BLOCK_SIZE, kv_place.device)
        own = [item.end - max(item.start, _first_own(number)) for number, item in zip(chosen, items, strict=True)]
        ends = np.cumsum([item.num_tokens for item in items])
        sampled = [np.arange(end - max(count, 0), end) for end, count in zip(ends, own, strict=True)]
        batch = replace(batch, sampled=torch.from_numpy(np.concatenate(sampled)))
        logits = run_packed(module, batch, cache, attention.plan(batch.work))
        for number, part in zip(chosen, torch.split(logits, [len(each) for each in sampled]), strict=True):
            parts[number].append(part)
            rows[number].num_computed += counts[number]
    return [torch.cat(part) for part in parts]


def _first_own(number: int) -> int:
    """The first token of a row whose logits count."""
    return 0 if number < len(_LENGTHS) else _SHARED_LEN


def _rows(vocab_size: int, num_copies: int = 1, *, shares_blocks: bool = False) -> list[Sequence]:
    """One of each length, then copies of each tail, over blocks of their own or the first of the one they begin as."""
    random, num_blocks = np.random.default_rng(3), 0
    rows: list[Sequence] = []
    prompts = [random.integers(0, vocab_size, length, dtype=np.int32) for length in _LENGTHS]
    tails = [random.integers(0, vocab_size, length, dtype=np.int32) for length in _TAILS]
    prompts += [np.concatenate([prompts[-1][:_SHARED_LEN], tail]) for tail in tails] * num_copies
    for number, ids in enumerate(prompts):
        row = Sequence(Request(number, ids, SamplingParams(max_tokens=1)), arrival=number)
        if shares_blocks:
            row.num_computed = _first_own(number)
        shared = rows[len(_LENGTHS) - 1].block_table[: row.num_computed // _BLOCK_SIZE] if row.num_computed else []
        needed = -(-len(ids) // _BLOCK_SIZE) - len(shared)
        row.block_table = [*shared, *range(num_blocks, num_blocks + needed)]
        num_blocks += needed
        rows.append(row)
    return rows


def _copies_for_teams() -> int:
    """Enough that rows of one token that share blocks are read together and still leave no thread without work."""
    return max(2, 2 * torch.get_num_threads())


def _steps_of_teams(num_copies: int) -> Steps:
    """What is shared is computed first; then the rows that share it go on beside each other, a token at a time."""
    steps = [(*_LENGTHS[:-1], _SHARED_LEN, *(0 for _ in _TAILS * num_copies))]
    steps += [(0, 0, 1, *(int(step < tail) for tail in _TAILS * num_copies)) for step in range(max(_TAILS))]
    return (*steps, (0, 0, _LENGTHS[-1] - _SHARED_LEN - max(_TAILS), *(0 for _ in _TAILS * num_copies)))
