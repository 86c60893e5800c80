"""How long the host plans a step, in milliseconds: decode rows of long sequences over shared prefixes.

python -m batchrun_kernels.planner_times
"""

import statistics
import time
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from batchrun_kernels.contract import Work
from batchrun_kernels.pieces import Rules
from batchrun_kernels.worklist import Planner, Worklist

_BLOCK_SIZE, _GROUP, _RUN_LEN = 16, 4, 64
# Sequences that are neighbours share their first tokens, as many as this.
_SIBLINGS, _SHARED_LEN = 16, 288
_LENGTHS = (300, 1500)
_WINDOW = 1024


@dataclass(frozen=True, slots=True)
class PlannerTimes:
    """Of a step that goes on from the one before, each sequence one token longer, and of one that starts anew."""

    name: str
    least_ms: float
    median_ms: float
    worst_ms: float


def plan_times(num_sequences: int = 256, num_steps: int = 64) -> list[PlannerTimes]:
    """With and without a window, and anew; a plan that goes on is first checked to equal one made anew."""
    steps = _decode_steps(num_sequences, num_steps)
    rules = Rules(group=_GROUP, block_size=_BLOCK_SIZE, run_len=_RUN_LEN)
    windowed = replace(rules, window=_WINDOW)
    for checked in (rules, windowed):
        planner = Planner(checked)
        for work in steps:
            _require_equal(planner.plan(work), Planner(checked).plan(work))
    return [
        _measure("decode to decode", rules, steps, goes_on=True),
        _measure(f"decode to decode, window {_WINDOW}", windowed, steps, goes_on=True),
        _measure("anew", rules, steps, goes_on=False),
        _measure(f"anew, window {_WINDOW}", windowed, steps, goes_on=False),
    ]


def _decode_steps(num_sequences: int, num_steps: int) -> list[Work]:
    random = np.random.default_rng(0)
    starts = random.integers(*_LENGTHS, num_sequences)
    width = -(-(int(starts.max()) + num_steps) // _BLOCK_SIZE)
    table = random.permutation(num_sequences * width).astype(np.int32).reshape(num_sequences, width)
    first = np.arange(num_sequences) // _SIBLINGS * _SIBLINGS
    table[:, : _SHARED_LEN // _BLOCK_SIZE] = table[first, : _SHARED_LEN // _BLOCK_SIZE]
    return [_decode_step(starts + grown, table) for grown in range(num_steps)]


def _decode_step(kv_lens: NDArray[np.int64], blocks: NDArray[np.int32]) -> Work:
    """As an engine packs it: a table as wide as the longest sequence, zero behind each one's last block."""
    num_blocks = -(-kv_lens // _BLOCK_SIZE)
    width = int(num_blocks.max())
    table = np.where(np.arange(width) < num_blocks[:, None], blocks[:, :width], 0).astype(np.int32)
    return Work((1,) * len(kv_lens), tuple(kv_lens.tolist()), torch.from_numpy(table), _BLOCK_SIZE)


def _measure(name: str, rules: Rules, steps: list[Work], *, goes_on: bool) -> PlannerTimes:
    planner = Planner(rules)
    planner.plan(steps[0])
    times = []
    for work in steps[1:]:
        planner = planner if goes_on else Planner(rules)
        began = time.perf_counter()
        planner.plan(work)
        times.append(1000 * (time.perf_counter() - began))
    return PlannerTimes(name, min(times), statistics.median(times), max(times))


def _require_equal(one: Worklist, other: Worklist) -> None:
    pairs = [
        (one.wide, other.wide),
        (one.narrow, other.narrow),
        (one.block_ids, other.block_ids),
        (one.positions, other.positions),
        (one.merges.tokens, other.merges.tokens),
        (one.merges.starts, other.merges.starts),
        (one.merges.slots, other.merges.slots),
    ]
    assert all(np.array_equal(*pair) for pair in pairs), "a plan that goes on differs from one made anew"


def main() -> None:
    print(f"{'planning 256 sequences of 300 to 1500 tokens':46}{'least ms':>10}{'median ms':>11}{'worst ms':>10}")
    for times in plan_times():
        print(f"{times.name:46}{times.least_ms:10.2f}{times.median_ms:11.2f}{times.worst_ms:10.2f}")


if __name__ == "__main__":
    main()
