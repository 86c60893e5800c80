"""Steps are chosen as large as what somebody waits for wants them."""

import pytest

from batchrun.engine.step_time import TERMS, StepTimes
from batchrun.executors.local import Limits
from batchrun.tune.choice import Choice, TypicalRow, Weights, candidates, choose, prospect

ROW = TypicalRow(prompt_len=256, output_len=64)
USUAL = Limits(max_num_seqs=128, max_num_batched_tokens=512)
ALL = candidates(max_rows=256, max_tokens=2048)


def made_of(**costs: float) -> StepTimes:
    return StepTimes.named(dict.fromkeys(TERMS, 0.0) | costs)


# Every step costs as much as 500 tokens: the more tokens in it, the more rows an hour, and the longer for each token.
COSTLY_STEPS = made_of(step=0.5, token=0.001)


def chosen(times: StepTimes, alpha: float, beta: float, row: TypicalRow = ROW) -> Limits:
    return choose(times, Weights(alpha, beta), row, USUAL, ALL).best.limits


def test_candidates_are_powers_of_two_within_what_was_measured() -> None:
    found = candidates(max_rows=16, max_tokens=200)
    assert found == [Limits(8, 64), Limits(8, 128), Limits(16, 64), Limits(16, 128)]


def test_alpha_wants_large_steps_and_beta_small_ones() -> None:
    assert chosen(COSTLY_STEPS, 1, 0) == Limits(256, 2048)
    assert chosen(COSTLY_STEPS, 0, 1) == Limits(8, 64)


def test_between_the_two_steps_grow_with_alpha() -> None:
    weights = [(0, 1), (0.3, 1), (1, 1), (3, 1), (10, 1), (1, 0)]
    tokens = [chosen(COSTLY_STEPS, *each).max_num_batched_tokens for each in weights]
    assert tokens == sorted(tokens)
    assert len(set(tokens)) >= 4


def test_only_the_weights_relation_counts() -> None:
    for alpha, beta in ((1, 1), (3, 1), (1, 7)):
        assert chosen(COSTLY_STEPS, alpha, beta) == chosen(COSTLY_STEPS, 63 * alpha, 63 * beta)


def test_the_usual_stays_where_nothing_is_clearly_better() -> None:
    """A device that computes a token in the same time, however many there are."""
    choice = choose(made_of(token=0.001), Weights(), ROW, USUAL, ALL)
    assert choice.best == choice.usual
    assert choice.best.limits == USUAL


def test_of_equally_good_limits_the_smallest_is_chosen() -> None:
    """From 1,024 tokens on a step costs by the token: nothing is to be had by still larger ones."""
    times = made_of(step=1.0, token_over_1024=0.001)
    best = choose(times, Weights(), ROW, USUAL, ALL).best.limits
    assert best.max_num_batched_tokens == 1024
    assert best.max_num_seqs == 256


def test_rows_that_leave_are_as_many_as_enter() -> None:
    """128 rows decode and two of them end in a step, so that two prompts enter in it: 640 tokens, if there is room."""
    roomy = prospect(made_of(token=1.0), ROW, Limits(128, 1024))
    assert (roomy.step_s, roomy.tokens_per_s) == (640.0, 128 / 640)
    tight = prospect(made_of(token=1.0), ROW, Limits(128, 320))
    assert (tight.step_s, tight.tokens_per_s) == (320.0, 64 / 320)


def test_the_first_token_comes_after_the_queue_and_the_prompt() -> None:
    """320 tokens a row and a second each: half of 1,000 rows are before one, and its own prompt takes a step."""
    assert prospect(made_of(token=1.0), ROW, Limits(128, 640)).first_token_s == pytest.approx(500 * 320 + 640)


def test_everything_compared_is_kept() -> None:
    choice: Choice = choose(COSTLY_STEPS, Weights(), ROW, USUAL, ALL)
    assert {choice.usual.limits} | {other.limits for other in choice.others} == set(ALL) | {USUAL}
