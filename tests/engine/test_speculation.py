"""Guesses come from what the row holds already, only where a step has room, and never change what it says."""

import numpy as np
import pytest

from batchrun.engine.echo import EOS_TOKEN_ID, EchoRunner
from batchrun.engine.engine import Engine
from batchrun.engine.request import Completion, Request, SamplingParams, TokenIds
from batchrun.engine.scheduler import SchedulerConfig
from batchrun.engine.speculation import PromptLookup
from batchrun.engine.step import Ended, Sampled, ScheduledBatch


def ids(*tokens: int) -> TokenIds:
    return np.array(tokens, dtype=np.int32)


@pytest.mark.parametrize(
    ("tokens", "guess"),
    [
        ((5, 6, 7, 8, 9, 5, 6, 7), [8, 9, 5, 6]),
        ((5, 6, 1, 6, 7, 2, 5, 6), [1, 6, 7, 2]),
        # The last place counts, a triple more than a pair.
        ((5, 6, 1, 5, 6, 2, 5, 6), [2, 5, 6, 2]),
        ((4, 5, 6, 1, 5, 6, 2, 4, 5, 6), [1, 5, 6, 2]),
        # It goes round.
        ((9, 3, 3, 3), [3, 3, 3, 3]),
        ((9, 1, 2, 1, 2), [1, 2, 1, 2]),
        ((1, 2, 3, 4), []),
        ((7,), []),
    ],
)
def test_what_followed_the_last_time_is_proposed(tokens: tuple[int, ...], guess: list[int]) -> None:
    assert PromptLookup().propose(ids(*tokens), most=9).tolist() == guess
    assert PromptLookup().propose(ids(*tokens), most=2).tolist() == guess[:2]


def test_a_lookup_that_grows_proposes_what_a_fresh_one_does() -> None:
    tokens = np.random.default_rng(0).integers(0, 4, 300).astype(np.int32)
    grown = PromptLookup()
    for length in range(1, 300, 3):
        assert grown.propose(tokens[:length], 4).tolist() == PromptLookup().propose(tokens[:length], 4).tolist()


def test_guesses_grow_while_they_are_right_and_pause_while_they_are_wrong() -> None:
    tokens, lookup = ids(*[1, 2] * 20), PromptLookup()
    lengths = []
    for _ in range(4):
        lengths.append(len(lookup.propose(tokens, 99)))
        lookup.learn(lengths[-1], lengths[-1])
    assert lengths == [4, 8, 16, 16]
    lookup.learn(0, 16)
    lengths = []
    for _ in range(12):
        lengths.append(len(lookup.propose(tokens, 99)))
        if lengths[-1]:
            lookup.learn(0, lengths[-1])
    assert lengths == [2, 0, 2, 0, 2, 0, 0, 2, 0, 0, 2, 0]


class Repeater(EchoRunner):
    """Counts from 10 to 14 and begins again; remembers how many tokens each step had."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks, 4, num_free_tokens=16)
        self.sizes: list[int] = []

    def launch(self, batch: ScheduledBatch) -> Ended:
        self.sizes.append(batch.num_tokens)
        tokens = [10 + (int(item.context[-1]) - 9) % 5 for item in batch.sampled]
        return Ended(Sampled(np.array(tokens, dtype=np.int32)))


def run(num_blocks: int, requests: list[Request], **options: int) -> tuple[dict[int, Completion], Repeater, Engine]:
    runner = Repeater(num_blocks)
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "num_free_tokens": 16} | options
    eos = frozenset({EOS_TOKEN_ID})
    engine = Engine(SchedulerConfig(num_blocks, 0, 4, runner.block_bytes, eos_token_ids=eos, **settings), runner, str)
    for request in requests:
        engine.add(request)
    done = {}
    while engine.has_work:
        done.update({completion.row_idx: completion for completion in engine.step()})
        engine.check()
    return done, runner, engine


def request(row: int, max_tokens: int, **sampling: object) -> Request:
    return Request(row, ids(20 + row, 10), SamplingParams(max_tokens=max_tokens, **sampling))  # type: ignore[arg-type]


def test_a_row_that_repeats_itself_takes_fewer_steps_and_says_the_same() -> None:
    plain, _, before = run(40, [request(0, 60)], num_free_tokens=0)
    done, runner, engine = run(40, [request(0, 60)])
    assert done == plain
    assert list(done[0].token_ids) == [10 + (at + 1) % 5 for at in range(60)]
    counters = engine.statistics().counters
    assert before.statistics().counters.steps == 60
    assert counters.steps < 15
    assert counters.accepted_tokens == counters.output_tokens - counters.steps
    # What was guessed wrong is not counted as work of the row's.
    assert counters.computed_tokens == 2 + 59
    assert max(runner.sizes) <= 16


@pytest.mark.parametrize("max_tokens", range(8, 24))
def test_no_row_is_longer_than_it_may_be(max_tokens: int) -> None:
    done, _, _ = run(40, [request(0, max_tokens)])
    assert len(done[0].token_ids) == max_tokens


def test_a_row_ends_at_a_stop_token_inside_of_a_guess() -> None:
    asked = [request(0, 60, min_tokens=33, stop_token_ids=(13,))]
    plain, _, _ = run(40, asked, num_free_tokens=0)
    done, _, engine = run(40, asked)
    assert done == plain
    assert (len(done[0].token_ids), done[0].finish_reason, done[0].stop_reason) == (33, "stop", 13)
    assert engine.statistics().counters.accepted_tokens > 20
    assert engine.statistics().kv_usage == 0


def test_rows_share_the_room_and_a_full_step_has_no_guesses() -> None:
    done, runner, _ = run(200, [request(row, 50) for row in range(8)])
    assert all(len(completion.token_ids) == 50 for completion in done.values())
    assert max(runner.sizes) == 16
    done, runner, engine = run(200, [request(row, 50) for row in range(8)], num_free_tokens=8)
    assert engine.statistics().counters.drafted_tokens == 0
    assert len(done) == 8


def test_a_pool_without_room_is_not_filled_with_guesses() -> None:
    """Two rows of 62 tokens in 32 blocks of 4: one block more than they need."""
    done, _, engine = run(32, [request(row, 60) for row in range(2)])
    assert all(len(completion.token_ids) == 60 for completion in done.values())
    assert engine.statistics().counters.preemptions == 0
