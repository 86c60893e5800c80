"""Thousands of random jobs against a model whose answer changes with any wrong block, position or copy."""

import random
from functools import partial
from typing import get_args

import numpy as np
import pytest

from batchrun.engine.echo import EOS_TOKEN_ID, EchoRunner, answer, choose, entries
from batchrun.engine.engine import Engine
from batchrun.engine.policies import Schedule
from batchrun.engine.request import Completion, Request, SamplingParams, TokenIds
from batchrun.engine.scheduler import SchedulerConfig
from batchrun.engine.speculation import PromptLookup
from batchrun.engine.statistics import Counters

MEAN_OUTPUT_LEN = 12  # tokens; a job with a larger mean runs into its limits, past what admission expected


def random_prompts(rng: random.Random, num_rows: int, vocab: int) -> list[list[int]]:
    """Rows that grow out of each other, as a dataset with shared instructions does; in plan order."""
    prompts: list[list[int]] = []
    for _ in range(num_rows):
        stem = rng.choice(prompts)[: rng.randint(0, 40)] if prompts and rng.random() < 0.8 else []
        own = [rng.randint(3, vocab) for _ in range(rng.randint(1, 30))]
        prompts.append(stem + own)
    return sorted(prompts)


def requests_of(prompts: list[list[int]], samplings: list[SamplingParams]) -> list[Request]:
    requests = []
    for row_idx, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        following = prompts[row_idx + 1] if row_idx + 1 < len(prompts) else []
        keep_len = next(
            (at for at, (a, b) in enumerate(zip(prompt, following, strict=False)) if a != b),
            min(len(prompt), len(following)),
        )
        requests.append(Request(row_idx, np.array(prompt, dtype=np.int32), sampling, keep_len))
    return requests


def make_engine(num_blocks: int, **options) -> Engine:
    block_size = options.pop("block_size", 4)
    num_host_slots = options.pop("num_host_slots", 0)
    mean_output_len, overlaps = options.pop("mean_output_len", MEAN_OUTPUT_LEN), options.pop("overlaps", False)
    num_states = options.get("num_state_slots", 0)
    runner = EchoRunner(
        num_blocks, block_size, num_host_slots, mean_output_len, overlaps=overlaps, num_state_slots=num_states
    )
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "eos_token_ids": frozenset({EOS_TOKEN_ID})} | options
    if overlaps:
        settings["num_free_tokens"] = 0
    config = SchedulerConfig(
        num_blocks=num_blocks,
        num_host_slots=num_host_slots,
        block_size=block_size,
        block_bytes=runner.block_bytes,
        **settings,
    )
    return Engine(config, runner, decode=lambda ids: "".join(map(chr, ids)))


def run(engine: Engine, requests: list[Request], *, forgets: bool = False) -> dict[int, Completion]:
    """Every invariant is checked after every step. With `forgets` the tree loses after each step what nobody uses."""
    for request in requests:
        engine.add(request)
    done: dict[int, Completion] = {}
    while engine.has_work:
        for completion in engine.step():
            assert completion.row_idx not in done, "a row finished twice"
            done[completion.row_idx] = completion
        if forgets:
            engine.scheduler.blocks.tree.clear()
        engine.check()
    return done


def expected(request: Request, mean_output_len: int = MEAN_OUTPUT_LEN) -> list[int]:
    ends = () if request.sampling.ignore_eos else (EOS_TOKEN_ID,)
    return answer(request.token_ids, request.sampling.max_tokens, mean_output_len, ends)


class OftenRight(PromptLookup):
    """Guesses by asking the model, and spoils some of it."""

    def __init__(self, seed: int, mean_output_len: int) -> None:
        super().__init__()
        self._rng = random.Random(seed)
        self._mean_output_len = mean_output_len

    def propose(self, tokens: TokenIds, most: int) -> TokenIds:
        guess = list(tokens)
        for _ in range(self._rng.randint(0, most)):
            right = choose(entries(np.array(guess, dtype=np.int32), 0), self._mean_output_len)
            guess.append(right if self._rng.random() < 0.8 else self._rng.randint(3, 200))
        return np.array(guess[len(tokens) :], dtype=np.int32)


def random_job(seed: int, schedule: Schedule | None = None, *, has_states: bool = False) -> Counters:
    """One random job against the oracle, under a random schedule when none is given; its counters."""
    rng = random.Random(seed)
    prompts = random_prompts(rng, rng.randint(1, 24), vocab=rng.choice([4, 6, 200]))
    most = rng.choice([10, 40, 80])
    samplings = [
        SamplingParams(max_tokens=rng.randint(1, most), ignore_eos=rng.random() < 0.1) for _ in range(len(prompts))
    ]
    requests = requests_of(prompts, samplings)
    block_size = rng.choice([1, 3, 4, 16])
    fewest = -(-max(request.max_len for request in requests) // block_size)
    mean_output_len = rng.choice([4, 1000, 1000])
    engine = make_engine(
        fewest + rng.choice([0, 1, 2, 4, 60]),
        block_size=block_size,
        mean_output_len=mean_output_len,
        num_host_slots=rng.choice([0, 12, 200, 200]),
        max_num_seqs=rng.choice([1, 4, 32]),
        max_num_batched_tokens=rng.choice([1, 7, 16, 63, 500]),
        schedule=schedule or rng.choice(["chunked", "chunked", "chunked", "prefill-first", "fcfs", "static"]),
        chunk_alignment_tokens=rng.choice([1, 1, 3, 16]),
        long_row_tokens=rng.choice([None, None, 1, 20]),
        preemption=rng.choice(["auto", "recompute", "swap", "swap"]),
        shares_prefixes=rng.random() < 0.85,
        overlaps=rng.random() < 0.5,
        num_free_tokens=rng.choice([0, 2, 16, 100]),
        num_state_slots=rng.choice([1, 3, 4, 32]) if has_states else 0,
    )
    engine.scheduler.speculation.lookup = partial(OftenRight, seed, mean_output_len)
    done = run(engine, requests, forgets=rng.random() < 0.3)
    assert {row_idx: list(completion.token_ids) for row_idx, completion in done.items()} == {
        request.row_idx: expected(request, mean_output_len) for request in requests
    }
    statistics = engine.statistics()
    assert statistics.kv_usage == 0.0, "blocks are still referenced after the last row"
    assert 0.0 < statistics.kv_peak <= 1.0
    latencies = engine.latencies()
    assert latencies.first_token.count == len(requests)
    assert latencies.per_token.count == statistics.counters.output_tokens - len(requests)
    return statistics.counters


@pytest.mark.parametrize("block_of_seeds", range(8))
def test_random_jobs_answer_like_the_model_alone(block_of_seeds):
    """Tiny pools, every policy, preemption both ways, sharing within a step: the same tokens as without an engine."""
    counters = [random_job(seed) for seed in range(block_of_seeds * 250, (block_of_seeds + 1) * 250)]
    assert sum(counter.cached_tokens for counter in counters) > 0
    assert sum(counter.recomputed_tokens for counter in counters) > 0
    assert sum(counter.recompute_preemptions for counter in counters) > 0
    assert sum(counter.swap_preemptions for counter in counters) > 0
    assert sum(counter.swapped_bytes for counter in counters) > 0
    num_accepted = sum(counter.accepted_tokens for counter in counters)
    assert sum(counter.drafted_tokens for counter in counters) > num_accepted > 0


def test_a_model_with_states_answers_the_same_whoever_had_the_slot_before():
    """Rows begin in slots that others left, cut their prompts, leave for the host and begin again; no more have a state
    than there are slots, and nothing is shared or guessed."""
    counters = [random_job(seed, has_states=True) for seed in range(500)]
    assert sum(counter.recompute_preemptions for counter in counters) > 0
    assert sum(counter.swap_preemptions for counter in counters) > 0
    assert sum(counter.cached_tokens + counter.drafted_tokens for counter in counters) == 0


@pytest.mark.parametrize("schedule", get_args(Schedule))
def test_no_schedule_changes_an_answer(schedule: Schedule) -> None:
    """The same jobs under each; every one of them is made to preempt, to share and to cut prompts."""
    counters = [random_job(seed, schedule) for seed in range(150)]
    assert sum(counter.cached_tokens for counter in counters) > 0
    assert sum(counter.recompute_preemptions for counter in counters) > 0
    assert sum(counter.swap_preemptions for counter in counters) > 0
