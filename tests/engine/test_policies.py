"""Who gets a step's tokens under each policy, and that long rows stall nobody. Time is counted in steps."""

import random

import pytest

from tests.engine.stepping import batches_of, request, scheduler, tokens_of

MANY = 10**6  # tokens; nothing is long


def job(prompt_lens, max_tokens=3, **options):
    """A scheduler with rows of these lengths, which share nothing."""
    engine = scheduler(**{"num_blocks": 2000} | options)
    for row_idx, prompt_len in enumerate(prompt_lens):
        engine.add(request(row_idx, range(1000 * row_idx, 1000 * row_idx + prompt_len), max_tokens=max_tokens))
    return engine


def first_token_steps(engine):
    """The step in which each row gets its first token, from 1, in the order in which they get it."""
    found = {}
    for number, batch in enumerate(batches_of(engine), start=1):
        for item in batch.sampled:
            found.setdefault(item.sequence.request.row_idx, number)
    return found


def is_decode(item):
    return item.start >= item.sequence.prompt_len


def test_chunked_gives_every_running_row_its_token_and_fills_the_step_with_chunks():
    steps = [tokens_of(batch) for batch in batches_of(job([10, 20, 3], long_row_tokens=MANY))]
    assert steps == [{0: 10, 1: 6}, {0: 1, 1: 14, 2: 1}, {0: 1, 2: 2, 1: 1}, {1: 1, 2: 1}, {2: 1}]


def test_prefill_first_computes_the_prompts_before_anybody_decodes():
    steps = [tokens_of(batch) for batch in batches_of(job([10, 20, 3], schedule="prefill-first"))]
    assert steps == [{0: 10, 1: 6}, {1: 14, 2: 2}, {2: 1}, {0: 1, 1: 1, 2: 1}, {0: 1, 1: 1, 2: 1}]


def test_fcfs_cuts_no_prompt_for_the_one_before_it():
    """Row 1 does not fit beside row 0, and longer than a step as it is has its two steps for itself."""
    steps = [tokens_of(batch) for batch in batches_of(job([10, 20, 3, 4], schedule="fcfs"))]
    assert steps == [{0: 10}, {1: 16}, {1: 4}, {2: 3, 3: 4}, *[{0: 1, 1: 1, 2: 1, 3: 1}] * 2]


@pytest.mark.parametrize("schedule", ["prefill-first", "fcfs"])
@pytest.mark.parametrize("seed", range(20))
def test_no_step_mixes_prompts_and_decodes(schedule, seed):
    rng = random.Random(seed)
    engine = job([rng.randint(1, 50) for _ in range(30)], schedule=schedule, num_blocks=rng.choice([30, 2000]))
    for batch in batches_of(engine):
        assert len({is_decode(item) for item in batch.items}) == 1


@pytest.mark.parametrize("seed", range(20))
def test_under_fcfs_first_tokens_come_in_the_order_of_arrival(seed):
    rng = random.Random(seed)
    engine = job([rng.randint(1, 50) for _ in range(30)], schedule="fcfs", num_blocks=rng.choice([30, 2000]))
    assert list(first_token_steps(engine)) == list(range(30))


def test_under_fcfs_nobody_passes_a_row_that_does_not_fit():
    engine = job([20, 30, 4], max_tokens=8, schedule="fcfs", num_blocks=10)
    assert list(first_token_steps(engine)) == [0, 1, 2]
    engine = job([20, 30, 4], max_tokens=8, schedule="prefill-first", num_blocks=10)
    assert list(first_token_steps(engine)) == [0, 2, 1]


def test_chunks_end_at_multiples_where_the_budget_allows():
    """What a cut leaves of a step is the next row's."""
    engine = job([3, 40, 5], chunk_alignment_tokens=8, long_row_tokens=MANY)
    ends = [[item.end for item in batch.items if not is_decode(item)] for batch in batches_of(engine)]
    assert ends == [[3, 8, 5], [16], [24], [40], [], []]


def test_a_budget_below_the_alignment_still_makes_progress():
    engine = job([20], max_tokens=1, max_num_batched_tokens=5, chunk_alignment_tokens=8)
    assert [batch.items[0].end for batch in batches_of(engine)] == [5, 8, 13, 16, 20]


@pytest.mark.parametrize("schedule", ["chunked", "prefill-first", "fcfs", "static"])
@pytest.mark.parametrize("alignment", [2, 7, 16])
def test_a_cut_prompt_ends_at_a_multiple_unless_none_was_in_reach(schedule, alignment):
    rng = random.Random(alignment)
    engine = job([rng.randint(1, 90) for _ in range(30)], schedule=schedule, chunk_alignment_tokens=alignment)
    num_aligned = 0
    for batch in batches_of(engine):
        for item in batch.items:
            if not item.samples:
                num_aligned += item.end % alignment == 0
                assert item.end % alignment == 0 or item.end // alignment * alignment <= item.start
    assert num_aligned > 10


def test_short_rows_get_their_first_token_beside_a_long_prompt_at_half_the_speed_at_worst():
    """Under every policy without a lane they wait for all of it."""
    short = [3] * 40
    alone = first_token_steps(job(short, max_num_seqs=64))
    beside = first_token_steps(job([990, *short], max_num_seqs=64))
    assert all(beside[row_idx + 1] <= 2 * alone[row_idx] + 1 for row_idx in range(40))
    assert list(beside)[-1] == 0
    for options in ({"schedule": "prefill-first"}, {"schedule": "fcfs"}, {"long_row_tokens": MANY}):
        behind = first_token_steps(job([990, *short], max_num_seqs=64, **options))
        assert min(behind[row_idx] for row_idx in range(1, 41)) >= 990 // 16


def test_a_long_prompt_has_half_of_what_decodes_leave_and_all_that_nobody_uses():
    engine = job([990, 3, 3], max_tokens=2)
    steps = [tokens_of(batch) for batch in batches_of(engine)]
    assert steps[:4] == [{0: 10, 1: 3, 2: 3}, {1: 1, 2: 1, 0: 14}, {0: 16}, {0: 16}]


def test_many_long_rows_in_front_keep_nobody_out():
    """More than admission looks past; and one at a time is computed."""
    engine = job([*[200] * 60, *[3] * 20])
    num_cut, finished = [], []
    for batch in batches_of(engine):
        num_cut.append(sum(item.sequence.gap > 16 for item in batch.items))
        finished += [item.sequence.request.row_idx for item in batch.sampled if item.sequence.is_finished]
    assert finished[:20] == list(range(60, 80))
    assert finished[20:] == list(range(60))
    assert max(num_cut) == 1


def test_a_long_row_without_room_is_passed_a_bounded_number_of_times():
    """It waits in the lane behind another one, then for room: short rows keep taking it, never all ending at once."""
    engine = job([100, 160], max_tokens=1, num_blocks=45, max_num_seqs=3)
    for row_idx in range(2, 1500):
        engine.add(request(row_idx, [row_idx, 3, 4], max_tokens=5 + row_idx % 3))
    finished = []
    for batch in batches_of(engine):
        finished += [item.sequence.request.row_idx for item in batch.sampled if item.sequence.is_finished]
    assert finished.index(0) < finished.index(1) < 350
    assert sorted(finished) == list(range(1500))


def test_rows_that_share_a_long_prefix_follow_at_once_when_it_is_computed():
    """The lane is for what is to be computed: with the prefix in the pool they are short."""
    engine = scheduler(num_blocks=400)
    for row_idx in range(6):
        engine.add(request(row_idx, [*range(100), 1000 + row_idx], keep_len=100 * (row_idx < 5)))
    first = first_token_steps(engine)
    assert first[0] == 7
    assert max(first.values()) <= 8
    assert engine.counters.cached_tokens == 500


def test_a_row_that_waits_for_the_lane_finds_what_later_rows_computed_of_its_prefix():
    """Row 2 is the last of the plan to share row 1's first tokens, and not the last to read them: row 1 is."""
    engine = scheduler()
    engine.add(request(0, range(1000, 1100)))
    engine.add(request(1, [*range(8), *range(2000, 2100)], keep_len=8))
    engine.add(request(2, [*range(8), 50], max_tokens=1))
    assert list(first_token_steps(engine)) == [2, 0, 1]
    assert engine.counters.cached_tokens == 8


def test_rows_that_nobody_began_come_back_in_plan_order_from_the_lane_too():
    engine = job([*[200] * 3, 3, 200, 3], max_num_seqs=2)
    next(batches_of(engine))
    assert [row.row_idx for row in engine.admission.close()] == [1, 2, 4, 5]
    assert engine.admission.num_waiting == 0
