"""The least time in which any program could answer a workload in float32 on this machine.

    floor = max(FLOPs / matrix rate, bytes / bandwidth)

    FLOPs = 2 x linear weights x tokens
          + 2 x vocabulary x hidden size x sampled
          + 4 x layers x heads x head size x pairs
    bytes = 4 x (linear weights + vocabulary x hidden size) x steps

*linear weights* are the numbers in the matrices of the decoder layers. *tokens* are those that remain when every prefix
that prompts share is computed once, the nodes of their trie; and, of each different prompt, the answer but its last
token, behind which nothing is computed. *sampled* are the tokens of the answers, the only ones that need logits.
*pairs* are of a query and a key: a token attends to itself and to all before it. *steps* is the longest answer, since
each of its tokens needs all weights again. The rates are those that last, measured between the runs.

Not counted, because it could be done meanwhile or in another way: norms, activations, the softmax, reading keys and
values, planning. So a ratio of 1 cannot quite be reached. Quantised weights have another floor.
"""

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from batchrun_jobs.bench.process import CHILDREN, Processes
from batchrun_jobs.bench.workload import Workload

_IN_A_LAYER = re.compile(r"\.\d+\..*\.weight$")
_FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Decoder:
    """What a token costs. `linear_weights` of all layers, `head_weights` from hidden state to logits; numbers.

    `heads_width` is layers x heads x head size.
    """

    linear_weights: int
    head_weights: int
    heads_width: int


@dataclass(frozen=True, slots=True)
class Least:
    """What must be computed and read."""

    flops: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Rates:
    """Float32 operations of a large matrix product, and bytes of memory read; a second, all threads together.

    `multiply_adds_per_s` are the operations that registers alone would allow; None where that cannot be measured.
    """

    flops_per_s: float
    bytes_per_s: float
    multiply_adds_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Floor:
    """What must be done, and how fast the machine was before the runs and after each round of them."""

    least: Least
    rates: tuple[Rates, ...]

    @property
    def usual(self) -> Rates:
        """The medians: a machine's clock changes, and the runs have had the same changes."""
        adds = [rates.multiply_adds_per_s for rates in self.rates if rates.multiply_adds_per_s is not None]
        return Rates(
            median(rates.flops_per_s for rates in self.rates),
            median(rates.bytes_per_s for rates in self.rates),
            median(adds) if adds else None,
        )

    @property
    def seconds(self) -> float:
        return max(self.least.flops / self.usual.flops_per_s, self.least.num_bytes / self.usual.bytes_per_s)


def read_decoder(folder: Path) -> Decoder | None:
    """From a model's files; None where the formula does not hold: experts, and attention that is not to all keys."""
    config = json.loads((folder / "config.json").read_bytes())
    config = config.get("text_config") or config
    shapes = dict(shape for file in sorted(folder.glob("*.safetensors")) for shape in _shapes(file))
    if any("experts" in name for name in shapes) or _has_window(config) or not config.get("num_attention_heads"):
        return None
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    matrices = [shape for name, shape in shapes.items() if len(shape) == 2 and _IN_A_LAYER.search(name)]
    return Decoder(
        linear_weights=sum(rows * columns for rows, columns in matrices),
        head_weights=config["vocab_size"] * hidden,
        heads_width=config["num_hidden_layers"] * heads * (config.get("head_dim") or hidden // heads),
    )


def least(workload: Workload, decoder: Decoder) -> Least:
    """The FLOPs and bytes of the formula above."""
    longest: dict[tuple[int, ...], int] = {}
    for ids, length in zip(workload.prompt_ids, workload.lengths, strict=True):
        longest[ids] = max(length, longest.get(ids, 0))
    num_tokens = num_pairs = 0
    for first, end in _new_tokens(sorted(longest)):
        num_tokens += end - first
        num_pairs += _pairs(first, end)
    for ids, length in longest.items():
        num_tokens += length - 1
        num_pairs += _pairs(len(ids), len(ids) + length - 1)
    return _least(decoder, num_tokens, num_pairs, sum(longest.values()), max(longest.values(), default=0))


def least_for_reading(texts: Sequence[tuple[int, ...]], num_read: int, decoder: Decoder) -> Least:
    """The same where nothing is generated: tokens to compute, and how many of them need logits; all in one step."""
    num_tokens = num_pairs = 0
    for first, end in _new_tokens(sorted(texts)):
        num_tokens += end - first
        num_pairs += _pairs(first, end)
    return _least(decoder, num_tokens, num_pairs, num_read, 1)


def _least(decoder: Decoder, num_tokens: int, num_pairs: int, num_sampled: int, num_steps: int) -> Least:
    linear, head = decoder.linear_weights, decoder.head_weights
    flops = 2 * linear * num_tokens + 2 * head * num_sampled + 4 * decoder.heads_width * num_pairs
    return Least(flops, _FLOAT32_BYTES * (linear + head) * num_steps)


def measure_rates(processes: Processes) -> Rates:
    """Takes some seconds, in a child with the ways' threads; raises ChildFailedError."""
    found = processes.run(CHILDREN / "machine_rates.py", sys.executable, Workload((), (), ()), {}).returned
    return Rates(found["matrix_flops_per_s"], found["bytes_per_s"], found["multiply_adds_flops_per_s"])


def _new_tokens(prompts: Sequence[tuple[int, ...]]) -> Iterator[tuple[int, int]]:
    """Of each of the sorted prompts the range of positions that no prompt before it has."""
    for before, ids in pairwise([(), *prompts]):
        same = enumerate(zip(before, ids, strict=False))
        yield next((at for at, (a, b) in same if a != b), min(len(before), len(ids))), len(ids)


def _pairs(first: int, end: int) -> int:
    """Keys that the tokens at positions `first` to `end`, exclusive, attend to together."""
    return (first + 1 + end) * (end - first) // 2


def _shapes(file: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The names and shapes of a safetensors file's tensors; its header is JSON behind its length in eight bytes."""
    with file.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    header.pop("__metadata__", None)
    for name, tensor in header.items():
        yield name, tuple(tensor["shape"])


def _has_window(config: dict[str, Any]) -> bool:
    layers = set(config.get("layer_types") or ())
    if layers:
        return layers != {"full_attention"}
    return bool(config.get("sliding_window")) and config.get("use_sliding_window", True)
