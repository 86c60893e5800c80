"""Beam search over blocks against a search without any: the same texts, whatever room, step and schedule there are."""

import random
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from batchrun.engine.echo import EOS_TOKEN_ID, EchoRunner, continuations, entries
from batchrun.engine.engine import Engine
from batchrun.engine.policies import Schedule
from batchrun.engine.request import BeamSearch, Completion, EarlyStoppingName, Request, SamplingParams
from batchrun.engine.statistics import Counters
from batchrun.engine.step import Launched, ScheduledBatch
from tests.engine.test_engine_with_echo import make_engine, random_prompts, requests_of

NEVER = np.float32(-1e9)
MOST_STEPS = 30_000  # of a job with a few hundred tokens to say, one a step


def searched(prompt: list[int], search: BeamSearch, sampling: SamplingParams) -> list[int]:
    """The text that transformers' search finds, in arrays of a fixed size as it has them."""
    num, ends = search.num_beams, {*sampling.stop_token_ids} | (set() if sampling.ignore_eos else {EOS_TOKEN_ID})
    running = [([], np.float32(0)), *[([], NEVER)] * (num - 1)]
    finished = [([], NEVER, False)] * num
    for length in range(1, sampling.max_tokens + 1):
        following = [
            ([*text, token], np.float32(score + np.float32(logprob)))
            for text, score in running
            if score > NEVER / 2
            for token, logprob in continuations(entries(np.array([*prompt, *text], np.int32), 0))
        ]
        following = sorted(following, key=lambda one: -one[1])[: search.num_candidates]
        hits = [text[-1] in ends or length == sampling.max_tokens for text, _ in following]
        norm = np.float32(length**search.length_penalty)
        new = [(text, score / norm, True) for (text, score), hit in zip(following[:num], hits, strict=False) if hit]
        finished = sorted([*finished, *new], key=lambda one: -one[1])[:num]
        running = [one for one, hit in zip(following, hits, strict=True) if not hit][:num]
        if not running:
            break
        full = all(is_finished for _, _, is_finished in finished)
        if full and search.early_stopping == "true":
            break
        is_never = search.early_stopping == "never" and search.length_penalty > 0
        hoped = running[0][1] / np.float32((sampling.max_tokens if is_never else length) ** search.length_penalty)
        if full and not hoped > finished[-1][1]:
            break
    return finished[0][0]


def beams(request: Request, search: BeamSearch) -> Request:
    return replace(request, beams=search, num_logprobs=search.num_candidates)


def search_for(engine: Engine, requests: list[Request], *, forgets: bool = False) -> dict[int, Completion]:
    """Every invariant is checked after every step. With `forgets` the tree loses after each step what nobody uses."""
    for request in requests:
        engine.add(request)
    done: dict[int, Completion] = {}
    for _ in range(MOST_STEPS):
        if not engine.has_work:
            break
        for completion in engine.step():
            assert completion.row_idx not in done, "a row finished twice"
            done[completion.row_idx] = completion
        if forgets:
            engine.scheduler.blocks.tree.clear()
        engine.check()
        scheduler = engine.scheduler
        assert len(scheduler.running) <= scheduler.config.max_num_seqs, "more beams run than may"
    assert not engine.has_work, "it does not come to an end"
    assert engine.scheduler.blocks.num_in_use == 0, "blocks are still referenced after the last row"
    return done


def fewest_blocks(request: Request, block_size: int) -> int:
    """That hold a row's beams at their longest: whole blocks of the prompt once, all others for each beam."""
    num_blocks, num_shared = -(-request.max_len // block_size), len(request.token_ids) // block_size
    return num_shared + request.num_sequences * (num_blocks - num_shared)


def random_job(seed: int, schedule: Schedule | None = None) -> Counters:
    """One random job against the oracle, in a pool that holds one of its rows at least; its counters."""
    rng = random.Random(seed)
    prompts = random_prompts(rng, rng.randint(1, 12), vocab=rng.choice([4, 200]))
    num_beams = rng.randint(2, 5)
    search = BeamSearch(
        num_beams, 2 * num_beams, rng.choice([0.0, 0.7, 1.0, 2.0, -1.0]), rng.choice(get_args(EarlyStoppingName))
    )
    samplings = [SamplingParams(max_tokens=rng.randint(1, 24), ignore_eos=rng.random() < 0.5) for _ in prompts]
    requests = [beams(request, search) for request in requests_of(prompts, samplings)]
    block_size = rng.choice([1, 3, 4, 7])
    engine = make_engine(
        num_blocks=max(fewest_blocks(request, block_size) for request in requests) + rng.choice([0, 0, 1, 3, 8, 60]),
        block_size=block_size,
        num_host_slots=rng.choice([0, 5, 40]),
        max_num_seqs=num_beams + rng.choice([0, 9, 40, 40, 40]),
        max_num_batched_tokens=rng.choice([1, 3, 16, 64]),
        schedule=schedule or rng.choice(get_args(Schedule)),
        preemption=rng.choice(["auto", "recompute", "swap"]),
        shares_prefixes=rng.random() < 0.7,
        overlaps=rng.random() < 0.3,
        num_free_tokens=rng.choice([0, 8]),
    )
    reserved = rng.choice([None, 0, 0, 1])
    if reserved is not None:
        # Rows enter as if they needed no room for what they will say, and then have to make each other leave.
        engine.scheduler.lengths.expected = lambda sampling, output_len: reserved * (output_len + 1)
    done = search_for(engine, requests, forgets=rng.random() < 0.3)
    for prompt, request in zip(prompts, requests, strict=True):
        completion, text = done[request.row_idx], searched(prompt, search, request.sampling)
        assert list(completion.token_ids) == text, (seed, request.row_idx)
        is_cut = request.sampling.ignore_eos or text[-1] != EOS_TOKEN_ID
        assert completion.finish_reason == ("length" if is_cut else "stop")
    return engine.scheduler.counters


@pytest.mark.parametrize("block_of_seeds", range(6))
def test_random_searches_find_what_a_search_without_blocks_finds(block_of_seeds: int) -> None:
    """And all of them come to an end: pools for one row, steps of one token, rows that enter without room for them."""
    counters = [random_job(seed) for seed in range(block_of_seeds * 100, block_of_seeds * 100 + 100)]
    assert sum(one.recompute_preemptions for one in counters) > 30
    assert sum(one.recomputed_tokens for one in counters) > 500
    assert sum(one.swap_preemptions for one in counters) == 0


@pytest.mark.parametrize("schedule", get_args(Schedule))
def test_no_schedule_changes_what_is_found(schedule: Schedule) -> None:
    for seed in range(1000, 1020):
        random_job(seed, schedule)


def long_rows(num_rows: int, num_beams: int, max_tokens: int = 30) -> tuple[list[list[int]], list[Request]]:
    rng = random.Random(7)
    prompts = sorted([rng.randint(3, 60) for _ in range(63)] for _ in range(num_rows))
    samplings = [SamplingParams(max_tokens=max_tokens, ignore_eos=True)] * num_rows
    requests = requests_of(prompts, samplings)
    return prompts, [beams(request, BeamSearch(num_beams, 2 * num_beams)) for request in requests]


@pytest.mark.parametrize("shares_prefixes", [True, False])
def test_beams_share_their_prompt_and_what_they_have_in_common(shares_prefixes: bool) -> None:
    """A sequence alone takes 24 blocks, and four with a table each 96."""
    _, (request,) = long_rows(1, num_beams=4)
    engine = make_engine(200, block_size=4, shares_prefixes=shares_prefixes)
    engine.add(request)
    most_used = 0
    while engine.has_work:
        engine.step()
        most_used = max(most_used, engine.scheduler.blocks.num_in_use)
    assert fewest_blocks(request, 4) == 15 + 4 * 9
    assert 23 < most_used < 32


def test_what_a_fork_says_costs_no_second_look_at_its_prompt() -> None:
    """Every round computes one token for each beam, and nothing twice."""
    _, (request,) = long_rows(1, num_beams=4)
    engine = make_engine(200, block_size=16)
    search_for(engine, [request])
    counters = engine.scheduler.counters
    assert counters.recomputed_tokens == 0
    assert counters.computed_tokens == 63 + 4 * 29


def test_the_oldest_row_keeps_its_beams_when_room_is_short() -> None:
    """The pool holds the beams of one row at their longest; others enter beside it, and have to leave."""
    _, requests = long_rows(5, num_beams=4, max_tokens=60)
    engine = make_engine(fewest_blocks(requests[0], 4), block_size=4, max_num_seqs=20, max_num_batched_tokens=64)
    engine.scheduler.lengths.expected = lambda sampling, output_len: 0
    for request in requests:
        engine.add(request)
    ended, left = [], set()
    while engine.has_work:
        ended += [completion.row_idx for completion in engine.step()]
        left |= {sequence.request.row_idx for sequence in engine.scheduler.admission.preempted}
        if not ended:
            running = {row[0].request.row_idx for row in engine.scheduler.running.rows}
            assert 0 in running, "the oldest row had to leave"
    assert left
    assert sorted(ended) == [0, 1, 2, 3, 4]


class FailingRunner(EchoRunner):
    """Cannot compute what has a certain token in it."""

    def __init__(self, poison: int) -> None:
        super().__init__(num_blocks=200, block_size=4)
        self._poison = poison

    def launch(self, batch: ScheduledBatch) -> Launched:
        if any(self._poison in item.context for item in batch.items):
            raise RuntimeError("an odd token")
        return super().launch(batch)


def test_a_row_fails_alone_when_one_of_its_beams_does() -> None:
    """Its text never has the token: a beam came across it. The other rows find what they would have found."""
    prompts, requests = long_rows(4, num_beams=3, max_tokens=6)
    plain = search_for(make_engine(400, block_size=4), requests)
    said = [{*completion.token_ids} for completion in plain.values()]
    tried = {
        token: [row for row, request in enumerate(requests) if token in heard_of(request)] for token in range(3, 259)
    }
    poison, (culprit,) = next(
        (token, rows) for token, rows in tried.items() if len(rows) == 1 and token not in said[rows[0]]
    )
    assert all(poison not in prompt for prompt in prompts)
    config = make_engine(200, block_size=4).scheduler.config
    done = search_for(Engine(config, FailingRunner(poison), decode=str), requests)
    assert [row for row, completion in done.items() if completion.error is not None] == [culprit]
    assert all(done[row].token_ids == plain[row].token_ids for row in plain if row != culprit)


def heard_of(request: Request) -> set[int]:
    """Tokens that are computed for the row's beams, but for those of the prompt."""
    engine, heard = make_engine(200, block_size=4), set()
    engine.add(request)
    while engine.has_work:
        engine.step()
        for sequence in engine.scheduler.running:
            heard |= {*sequence.output_ids.tolist()}
    return heard - {*request.token_ids.tolist()}


def test_other_tokens_may_end_a_text() -> None:
    """With as many candidates more, so that no beam is lost to them; the token is the stop reason."""
    prompts, requests = long_rows(6, num_beams=3)
    sampling = SamplingParams(max_tokens=30, stop_token_ids=(40, 41, 97, 101, 105))
    search = BeamSearch(3, 3 * 7)
    requests = [beams(replace(request, sampling=sampling), search) for request in requests]
    done = search_for(make_engine(200, block_size=4), requests)
    for prompt, request in zip(prompts, requests, strict=True):
        completion = done[request.row_idx]
        assert list(completion.token_ids) == searched(prompt, search, sampling)
        last = completion.token_ids[-1]
        assert completion.stop_reason == (last if last in sampling.stop_token_ids else None)
    assert {completion.finish_reason for completion in done.values()} >= {"stop"}
