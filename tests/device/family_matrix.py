"""What every tiny family gives over blocks, against its own eager attention; as a table.

python -m tests.device.family_matrix
"""

from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from batchrun.engine.batch import pack
from batchrun.engine.engine import Engine
from batchrun.engine.kv_cache import KVCache
from batchrun.engine.model import Model
from batchrun.engine.radix import common_len
from batchrun.engine.request import Request, SamplingParams
from batchrun.engine.runner import TorchRunner
from batchrun.engine.runner_options import RunnerOptions
from batchrun.engine.scheduler import SchedulerConfig
from batchrun.engine.statistics import Counters
from batchrun.engine.step import Item, ScheduledBatch
from batchrun.errors import ModelUnavailable
from batchrun.quiet import quiet_transformers
from tests.device.steps import Blocks, make_sequence
from tests.device.tiny_families import FAMILIES, REFUSED, VOCAB, WIDE, make_model, make_refused

BLOCK = 4
# Row 0 and 1 share 10 tokens: two whole blocks, and two slots of the third by copy.
LENGTHS, SHARED = (26, 19, 31), 10
NUM_NEW = 9
# Tokens of each row's chunks.
ALL = (max(LENGTHS),) * 3
# The longest row takes 9 blocks, and 6 run at a time: rows must leave, to the host until it is full.
NUM_SEQS, NUM_BLOCKS = 6, 13
# By whether rows have states, and so share no blocks: then more of them are a row's own.
NUM_HOST_SLOTS = {False: 3, True: 5}


@dataclass(frozen=True, slots=True)
class Served:
    """`error` is the largest difference of a logit over blocks from eager's, `largest` the largest logit.

    `greedy_rows` of the engine's `num_rows` rows have the tokens that eager attention would choose.
    """

    architecture: str
    attention: str
    needs: tuple[str, ...]
    num_fused: int
    error: float
    largest: float
    greedy_rows: int
    num_rows: int
    counters: Counters
    has_states: bool


def measure(family: str, **changes: Any) -> Served:
    """Raises ModelUnavailable where the family is refused."""
    module = make_model(family, **changes)
    eager, prompts = deepcopy(module), make_prompts()
    expected = logits_alone(eager, prompts)
    model = Model.adopt(module)
    expected[1] = expected[1][num_shared(model) :]
    got = logits_over_blocks(model, prompts)
    rows = make_rows()
    outputs, counters = run_engine(model, rows)
    return Served(
        architecture=type(module).__name__,
        attention=model.attention.name,
        needs=tuple(sorted(model.needs)),
        num_fused=sum(_is_fused(one) for one in module.modules()),
        error=max(float((ours - theirs).abs().max()) for ours, theirs in zip(got, expected, strict=True)),
        largest=max(float(theirs.abs().max()) for theirs in expected),
        greedy_rows=sum(_is_greedy(eager, ids, output) for ids, output in zip(rows, outputs, strict=True)),
        num_rows=len(rows),
        counters=counters,
        has_states=model.state_bytes > 0,
    )


def make_prompts() -> list[list[int]]:
    random = np.random.default_rng(3)
    rows = [random.integers(3, VOCAB, length).tolist() for length in LENGTHS]
    rows[1][:SHARED] = rows[0][:SHARED]
    return rows


def make_rows() -> list[list[int]]:
    """Ten rows in plan order, that share 5 to 14 tokens with one another."""
    random = np.random.default_rng(4)
    stem = random.integers(3, VOCAB, 14).tolist()
    return sorted(stem[: 5 + row] + random.integers(3, VOCAB, 1 + 5 * row % 13).tolist() for row in range(10))


@torch.inference_mode()
def logits_alone(module: Any, prompts: list[list[int]]) -> list[Tensor]:
    return [module(input_ids=torch.tensor([ids]), use_cache=False).logits[0] for ids in prompts]


def num_shared(model: Model) -> int:
    """Tokens that row 1 takes from row 0; it cannot take a state."""
    return 0 if model.state_bytes else SHARED


@torch.inference_mode()
def logits_over_blocks(model: Model, prompts: list[list[int]]) -> list[Tensor]:
    """Each row's, of all its tokens."""
    return [torch.cat(chunks) for chunks in logits_of_chunks(model, prompts, ALL)]


def logits_of_chunks(model: Model, prompts: list[list[int]], num_read: tuple[int, ...]) -> list[list[Tensor]]:
    """Three steps: chunks, row 1 joining row 0's blocks in the step that writes them; more chunks; single tokens.

    Of each row's chunks the last `num_read` tokens are read, or all where there are fewer.
    """
    blocks = Blocks(num_blocks=40)
    sequences = [make_sequence(row, ids, blocks.take(9)) for row, ids in enumerate(prompts)]
    for row, sequence in enumerate(sequences):
        sequence.state_slot = 2 * row
    shared = num_shared(model)
    sequences[1].block_table[: shared // BLOCK] = sequences[0].block_table[: shared // BLOCK]
    cache = model.make_cache(40, BLOCK, num_state_slots=5)
    poison(cache)
    third = [sequence.block_table[2] * BLOCK for sequence in sequences]
    copies = ((third[0], third[1]), (third[0] + 1, third[1] + 1)) if shared else ()
    spans = [[(0, 13), (shared, 15 - shared), (0, 17)], [(13, 12), (15, 3), (17, 13)], [(25, 1), (18, 1), (30, 1)]]
    parts: list[list[Tensor]] = [[], [], []]
    for step, cuts in enumerate(spans):
        items = tuple(Item(one, start, num, samples=True) for one, (start, num) in zip(sequences, cuts, strict=True))
        batch = pack(ScheduledBatch(items, slot_copies=copies if step == 0 else ()), BLOCK, torch.device("cpu"))
        nums = [num for _, num in cuts]
        read = [min(num, most) for num, most in zip(nums, num_read, strict=True)]
        is_read = [torch.arange(num) >= num - last for num, last in zip(nums, read, strict=True)]
        batch = replace(batch, sampled=torch.cat(is_read).nonzero()[:, 0])
        for own, part in zip(parts, torch.split(model.forward(batch, cache), read), strict=True):
            own.append(part)
    return parts


def run_engine(model: Model, rows: list[list[int]]) -> tuple[list[list[int]], Counters]:
    """Each row's greedy tokens from an engine with too few blocks: chunks, shared prefixes, both ways of leaving."""
    block_bytes = sum(layer.block_bytes(BLOCK, model.place.dtype) for layer in model.kv_layers.values())
    num_host_slots = NUM_HOST_SLOTS[model.state_bytes > 0]
    options = RunnerOptions(
        block_size=BLOCK,
        max_num_seqs=NUM_SEQS,
        kv_cache_memory=NUM_BLOCKS * block_bytes + NUM_SEQS * model.state_bytes,
        swap_space=num_host_slots * block_bytes,
    )
    runner = TorchRunner.lay_out(model, options, eos_token_ids=())
    poison(runner._shard.cache)
    return run_rows(runner, rows)


def run_rows(runner: TorchRunner, rows: list[list[int]]) -> tuple[list[list[int]], Counters]:
    """The same from a runner of as few blocks, or of which no more are used."""
    config = SchedulerConfig(
        num_blocks=min(NUM_BLOCKS, runner.num_blocks),
        num_host_slots=runner.num_host_slots,
        block_size=BLOCK,
        block_bytes=runner.block_bytes,
        max_num_seqs=NUM_SEQS,
        max_num_batched_tokens=19,
        eos_token_ids=frozenset(),
        preemption="swap",
        num_state_slots=runner.num_state_slots,
    )
    engine = Engine(config, runner, decode=lambda ids: "")
    for row, ids in enumerate(rows):
        following = rows[row + 1] if row + 1 < len(rows) else []
        keep_len = common_len(np.array(ids, np.int32), np.array(following, np.int32))
        engine.add(Request(row, np.array(ids, np.int32), SamplingParams(max_tokens=NUM_NEW), keep_len))
    outputs = {}
    while engine.has_work:
        for completion in engine.step():
            outputs[completion.row_idx] = list(completion.token_ids)
        engine.check()
    return [outputs[row] for row in range(len(rows))], engine.statistics().counters


def poison(cache: KVCache) -> None:
    for pool in cache.pools.values():
        pool.keys.fill_(torch.nan)
        pool.values.fill_(torch.nan)
    if cache.states is not None:
        for states in cache.states.states.values():
            states.fill_(torch.nan)


def _is_fused(module: Any) -> bool:
    return type(module).__module__.startswith("batchrun.engine.fused") or "forward" in vars(module)


@torch.inference_mode()
def _is_greedy(module: Any, prompt: list[int], output: list[int]) -> bool:
    """Whether each token is the likeliest after those before it: then they are what greedy generation gives."""
    logits = module(input_ids=torch.tensor([prompt + output]), use_cache=False).logits[0]
    return len(output) == NUM_NEW and logits[len(prompt) - 1 : -1].argmax(-1).tolist() == output


def main() -> None:
    print(f"{'family':20}{'architecture':29}{'logit error':>12}{'largest':>9}{'greedy':>8}{'fused':>7}  attention")
    num_equal = 0
    for family in FAMILIES:
        served = measure(family, **WIDE)
        greedy = f"{served.greedy_rows}/{served.num_rows}"
        num_equal += served.greedy_rows == served.num_rows
        print(
            f"{family:20}{served.architecture:29}{served.error:12.1e}{served.largest:9.1f}{greedy:>8}"
            f"{served.num_fused:7}  {' '.join([served.attention, *served.needs])}"
        )
    print(f"{num_equal} of {len(FAMILIES)} families give eager attention's tokens in every row\n\nrefused")
    for family in REFUSED:
        try:
            Model.adopt(make_refused(family))
            print(f"{family:20}IS NOT REFUSED")
        except ModelUnavailable as error:
            print(f"{family:20}{error}")


if __name__ == "__main__":
    with quiet_transformers():
        main()
