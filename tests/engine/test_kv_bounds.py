"""What the pool is used for stays within bounds, whatever its size: the figures of `kv_table`, on rows made here."""

import numpy as np
import pytest

from tests.engine.kv_table import Workload, made_tree, run, sampled, workload
from tests.engine.test_latencies import SteppedClock, finish, make_engine, request


def mixed(seed: int) -> Workload:
    """Prompts of 30 to 400 tokens, and outputs of 5 to 300 whose length nobody knows."""
    rng = np.random.default_rng(seed)
    lengths = np.exp(rng.uniform(np.log(5), np.log(300), 128)).astype(int).tolist()
    return workload("mixed", ((rng.integers(3, 49_000, rng.integers(30, 400)).tolist(), length) for length in lengths))


def test_every_shared_token_is_found_in_a_pool_that_holds_what_runs() -> None:
    """Beside rows that come and go at their own time, in a tree of four levels."""
    work = made_tree(3000)
    assert run(work, run(work, None).peak).counters.cached_tokens >= 0.97 * work.most_hits > 0


def test_the_engine_knows_its_peak_to_the_block() -> None:
    """Also that of a step whose rows all end with it, after which nothing is in use."""
    engine = make_engine(SteppedClock(), num_blocks=40, max_num_batched_tokens=64)
    for row_idx in range(3):
        engine.add(request(row_idx, 9, 1))
    finish(engine)
    assert (engine.statistics().kv_usage, engine.statistics().kv_peak) == (0.0, 9 / 40)


def test_few_slots_of_the_blocks_in_use_are_empty() -> None:
    assert 0 < run(mixed(63), None).waste < 0.04


@pytest.mark.parametrize(("share", "most"), [(0.5, 0.03), (0.25, 0.08)])
@pytest.mark.parametrize("shares_prefixes", [True, False])
def test_little_is_computed_again_in_a_pool_that_is_too_small(share: float, most: float, shares_prefixes: bool) -> None:
    """And it takes fewer steps than admitting rows only where they fit at their longest."""
    num_preempted = 0
    for work in map(mixed, range(3)):
        num_blocks = int(share * run(work, None).peak)
        ours = run(work, num_blocks, shares_prefixes=shares_prefixes).counters
        careful = run(work, num_blocks, overcommits=False).counters
        assert ours.recomputed_tokens <= most * ours.computed_tokens
        assert ours.steps <= careful.steps
        assert careful.preemptions == 0
        num_preempted += ours.preemptions
    assert num_preempted > 0


@pytest.mark.parametrize("prompt_len", [17, 100, 111, 112, 113, 600])
def test_samples_of_a_row_share_all_blocks_of_its_prompt_but_the_last(prompt_len: int) -> None:
    """Which each copies as far as it is filled: only the prompt's last token is computed for each of them. Also in
    steps that hold no whole prompt."""
    output_len, num_samples = 21, 8
    several = sampled(workload("one", [(list(range(prompt_len)), output_len)]), num_samples)
    used = run(several, None)
    num_shared = (prompt_len - 1) // 16
    # The last token of the output is never computed.
    whole = -(-(prompt_len + output_len - 1) // 16)
    assert used.peak == num_shared + num_samples * (whole - num_shared)
    assert used.counters.computed_prompt_tokens == prompt_len + num_samples - 1
    assert run(several, None, shares_prefixes=False).peak == num_samples * whole


def test_samples_need_no_more_room_when_they_are_preempted() -> None:
    work = sampled(mixed(5), 8)
    roomy = run(work, None)
    tight = run(work, roomy.peak // 2).counters
    assert tight.preemptions > 0
    assert tight.recomputed_tokens <= 0.05 * tight.computed_tokens
