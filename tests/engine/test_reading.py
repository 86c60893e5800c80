"""Rows that are read instead of continued: the same readings whatever is shared, cut, preempted or in flight."""

import random

import numpy as np
import pytest

from batchrun.engine.echo import entries, hidden, logprob
from batchrun.engine.request import PooledHidden, Request, SamplingParams, TokenLogprobs
from tests.engine.test_engine_with_echo import make_engine, random_prompts, requests_of, run

NOTHING = SamplingParams(max_tokens=1)


def scored(request: Request, rng: random.Random) -> Request:
    """The request with a target of its own last tokens, and two more tokens asked for at a place in it."""
    last = len(request.token_ids) - 1
    first = rng.randint(0, last)
    positions = [*range(first, last + 1), *[rng.randint(first, last)] * 2]
    order = np.argsort(positions, kind="stable")
    tokens = np.array([rng.randint(3, 40) for _ in positions], np.int32)
    reads = TokenLogprobs(np.array(positions, np.int32)[order], tokens)
    return Request(request.row_idx, request.token_ids, NOTHING, request.keep_len, reads=reads)


def expected_logprobs(request: Request) -> list[tuple[float, float]]:
    assert isinstance(request.reads, TokenLogprobs)
    context = entries(request.token_ids, 0)
    pairs = zip(request.reads.positions.tolist(), request.reads.token_ids.tolist(), strict=True)
    return [logprob(context[: at + 1], token) for at, token in pairs]


@pytest.mark.parametrize("seed", range(60))
def test_log_probabilities_do_not_depend_on_how_the_rows_ran(seed):
    rng = random.Random(seed)
    prompts = random_prompts(rng, rng.randint(1, 30), vocab=8)
    requests = [scored(request, rng) for request in requests_of(prompts, [NOTHING] * len(prompts))]
    longest = max(len(prompt) for prompt in prompts)
    engine = make_engine(
        num_blocks=-(-longest // 4) + rng.randint(1, 25),
        num_host_slots=rng.choice([0, 40]),
        max_num_batched_tokens=rng.choice([1, 5, 16, 64]),
        schedule=rng.choice(["chunked", "prefill-first", "fcfs", "static"]),
        preemption=rng.choice(["recompute", "auto"]),
        overlaps=rng.random() < 0.5,
        shares_prefixes=rng.random() < 0.8,
    )
    done = run(engine, requests, forgets=rng.random() < 0.3)
    assert {row: one.readings.tolist() for row, one in done.items()} == {
        request.row_idx: [list(pair) for pair in expected_logprobs(request)] for request in requests
    }
    counters = engine.statistics().counters
    assert counters.output_tokens == 0


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("seed", range(20))
def test_pooled_states_do_not_depend_on_how_the_rows_ran(seed, pooling):
    rng = random.Random(seed)
    prompts = random_prompts(rng, rng.randint(1, 30), vocab=8)
    requests = [
        Request(one.row_idx, one.token_ids, NOTHING, one.keep_len, reads=PooledHidden(pooling))
        for one in requests_of(prompts, [NOTHING] * len(prompts))
    ]
    longest = max(len(prompt) for prompt in prompts)
    engine = make_engine(
        num_blocks=-(-longest // 4) + rng.randint(1, 25),
        num_host_slots=rng.choice([0, 40]),
        max_num_batched_tokens=rng.choice([1, 5, 16]),
        overlaps=rng.random() < 0.5,
    )
    done = run(engine, requests)
    for request in requests:
        context = entries(request.token_ids, 0)
        states = [hidden(context[:end]) for end in range(1, len(context) + 1)]
        state = states[-1] if pooling == "last" else np.sum(states, axis=0) / len(states)
        assert done[request.row_idx].readings.tolist() == state.tolist()


def test_branches_behind_one_prompt_compute_no_token_twice():
    """Each branch enters with everything but its own tokens in the tree, or in its neighbour's last block."""
    prompt = list(range(3, 3 + 21))
    chains = [[*prompt, *chain] for chain in ((40, 41, 42), (40, 43), (44,), (44, 45, 46, 47, 48))]
    firsts = [len(prompt) - 1, len(prompt) + 1, len(prompt), len(prompt) + 1]
    requests = []
    for at, (chain, first) in enumerate(zip(chains, firsts, strict=True)):
        positions = np.arange(first, len(chain), dtype=np.int32)
        reads = TokenLogprobs(positions, np.full(len(positions), 50, np.int32))
        keep_len = len(prompt) if at < len(chains) - 1 else 0
        requests.append(Request(0, np.array(chain, np.int32), NOTHING, keep_len, reads=reads, branch=at))
    for budget in (64, 7):
        engine = make_engine(num_blocks=40, max_num_batched_tokens=budget)
        for request in requests:
            engine.add(request)
        while engine.has_work:
            engine.step()
            engine.check()
        assert engine.statistics().counters.computed_tokens == len(prompt) + 3 + 1 + 1 + 4


def test_what_cannot_be_shared_is_computed_for_what_is_read_there():
    """Two equal rows, both read from their first token on: nothing is taken from the tree."""
    tokens = np.arange(3, 15, dtype=np.int32)
    reads = TokenLogprobs(np.arange(12, dtype=np.int32), tokens)
    engine = make_engine(num_blocks=40)
    done = run(engine, [Request(row, tokens, NOTHING, 12, reads=reads) for row in range(2)])
    assert engine.statistics().counters.cached_tokens == 0
    assert done[0].readings.tolist() == done[1].readings.tolist()
