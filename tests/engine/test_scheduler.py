"""What the scheduler promises about order, sharing and room, one promise a test."""

import numpy as np
import pytest

from batchrun.engine.lengths import OutputLengths
from batchrun.engine.preemption import Costs, choose_way
from batchrun.engine.request import Request, SamplingParams
from batchrun.engine.step import NO_TOKEN, Sampled
from tests.engine.stepping import batches_of, launch, request, scheduler, step, tokens_of


def test_a_step_mixes_decodes_with_prompt_chunks_up_to_the_budget():
    engine = scheduler()
    engine.add(request(0, range(10, 20)))
    engine.add(request(1, range(30, 70)))
    assert step(engine)[0] == {0: 10, 1: 6}
    assert step(engine)[0] == {0: 1, 1: 15}


def test_a_finished_row_gives_its_place_to_a_waiting_one_before_the_next_step():
    engine = scheduler(max_num_seqs=1)
    engine.add(request(0, [5, 6], max_tokens=1))
    engine.add(request(1, [8, 9], max_tokens=1))
    assert step(engine) == ({0: 2}, [0])
    assert step(engine) == ({1: 2}, [1])


def test_rows_of_one_step_share_a_prefix_down_to_the_token():
    """Two whole blocks and two tokens of a third: the second row computes only what is its own."""
    engine = scheduler(max_num_batched_tokens=64)
    engine.add(request(0, [*range(10, 20), 50, 51], keep_len=10))
    engine.add(request(1, [*range(10, 20), 60, 61]))
    batch = engine.schedule()
    assert [(item.start, item.num_tokens) for item in batch.items] == [(0, 12), (10, 2)]
    first, second = (item.sequence.block_table for item in batch.items)
    assert first[:2] == second[:2]
    assert first[2] != second[2]
    assert batch.slot_copies == ((first[2] * 4, second[2] * 4), (first[2] * 4 + 1, second[2] * 4 + 1))


def test_a_copy_of_a_copy_reads_where_the_tokens_are_written():
    """Three rows grow out of each other inside one block and one step: no copy reads what another copy writes."""
    engine = scheduler(max_num_batched_tokens=64)
    engine.add(request(0, [10, 11, 12, 13, 14]))
    engine.add(request(1, [10, 11, 20, 21, 22]))
    engine.add(request(2, [10, 11, 20, 30, 31]))
    batch = engine.schedule()
    sources = {source for source, _ in batch.slot_copies}
    assert len(batch.slot_copies) == 5
    assert not sources & {destination for _, destination in batch.slot_copies}


def test_a_row_waits_for_the_prefix_that_a_running_one_is_computing():
    engine = scheduler(max_num_batched_tokens=8, schedule="prefill-first")
    engine.add(request(0, [*range(10, 30), 50], keep_len=20))
    engine.add(request(1, [*range(10, 30), 60]))
    steps = [step(engine)[0] for _ in range(3)]
    assert steps == [{0: 8}, {0: 8}, {0: 5, 1: 1}]
    assert engine.counters.computed_prompt_tokens == 22


def test_a_later_row_enters_past_one_that_does_not_fit():
    """And the one that was passed is not forgotten: it enters when there is room."""
    engine = scheduler(num_blocks=10)
    engine.add(request(0, range(10, 30), max_tokens=8))
    step(engine)
    engine.add(request(1, range(40, 70), max_tokens=8))
    engine.add(request(2, range(80, 84), max_tokens=2))
    step(engine)
    order = []
    while engine.has_work:
        order += step(engine)[1]
    assert order == [2, 0, 1]


def test_a_row_can_be_passed_only_a_bounded_number_of_times():
    engine = scheduler(num_blocks=12, max_num_seqs=2)
    engine.add(request(0, range(10, 20), max_tokens=30))
    step(engine)
    engine.add(request(1, range(40, 70), max_tokens=8))
    for row_idx in range(2, 1000):
        engine.add(request(row_idx, [row_idx], max_tokens=1))
    finished = []
    while 1 not in finished:
        finished += step(engine)[1]
    assert len(finished) < 300


def test_short_rows_finish_while_a_long_prompt_is_being_computed():
    engine = scheduler(num_blocks=400)
    engine.add(request(0, range(10, 1000), max_tokens=1))
    for row_idx in range(1, 9):
        engine.add(request(row_idx, [2000 + row_idx] * 3, max_tokens=2))
    finished = []
    while 0 not in finished:
        finished += step(engine)[1]
    assert finished[-1] == 0
    assert sorted(finished) == list(range(9))


def test_a_long_prompt_takes_the_whole_budget_when_nobody_else_can_use_it():
    engine = scheduler(num_blocks=400)
    engine.add(request(0, range(10, 1000), max_tokens=1))
    engine.add(request(1, range(5000, 6000), max_tokens=1))
    assert step(engine)[0] == {0: 16}


@pytest.mark.parametrize("way", ["recompute", "swap"])
def test_a_full_pool_makes_one_sequence_leave_and_come_back(way):
    engine = scheduler(num_blocks=8, num_host_slots=20, preemption=way, max_num_seqs=4)
    for row_idx in range(2):
        tokens = np.arange(row_idx * 50 + 10, row_idx * 50 + 16, dtype=np.int32)
        engine.add(Request(row_idx, tokens, SamplingParams(max_tokens=14)))
    finished = []
    while engine.has_work:
        finished += step(engine)[1]
    assert sorted(finished) == [0, 1]
    counters = engine.counters
    assert (counters.recompute_preemptions, counters.swap_preemptions) == ((1, 0) if way == "recompute" else (0, 1))
    assert (counters.recomputed_tokens > 0) == (way == "recompute")


@pytest.mark.parametrize("shares_prefixes", [True, False])
def test_a_row_that_had_to_leave_finds_what_is_left_of_it_though_rows_share_nothing(shares_prefixes):
    engine = scheduler(num_blocks=8, preemption="recompute", shares_prefixes=shares_prefixes)
    for row_idx, first in enumerate((10, 60, 60)):
        engine.add(Request(row_idx, np.arange(first, first + 6, dtype=np.int32), SamplingParams(max_tokens=14)))
    starts = [
        (item.sequence.request.row_idx, item.start)
        for batch in batches_of(engine)
        for item in batch.items
        if item.num_tokens > 1
    ]
    assert starts == [(0, 0), (1, 0), (1, 12)] + ([] if shares_prefixes else [(2, 0)])


def test_nobody_enters_in_a_step_that_made_somebody_leave():
    """Row 2 waits for a place; the step in which row 1 gives up its place gives it to nobody."""
    engine = scheduler(num_blocks=8, max_num_seqs=2)
    for row_idx, max_tokens in enumerate([14, 14, 1]):
        tokens = np.arange(row_idx * 50 + 10, row_idx * 50 + 16, dtype=np.int32)
        engine.add(Request(row_idx, tokens, SamplingParams(max_tokens=max_tokens)))
    while not engine.counters.preemptions:
        ran, _ = step(engine)
    assert ran == {0: 1}


def test_a_static_batch_is_refilled_only_when_its_last_row_is_done():
    engine = scheduler(schedule="static", max_num_seqs=2)
    for row_idx, max_tokens in enumerate([1, 5, 1, 1]):
        engine.add(request(row_idx, [row_idx * 10 + 5], max_tokens=max_tokens))
    batches = []
    while engine.has_work:
        batches.append(sorted(step(engine)[0]))
    assert batches == [[0, 1], [1], [1], [1], [1], [2, 3]]


def test_admission_reserves_what_running_rows_are_expected_to_need():
    """Known lengths that do not fit together are not started together, so nobody is ever preempted."""
    engine = scheduler(num_blocks=8)
    for row_idx in range(4):
        engine.add(request(row_idx, [row_idx * 10 + 5, 6, 7], max_tokens=20))
    while engine.has_work:
        step(engine)
    assert engine.counters.preemptions == 0


def test_expected_length_is_learned_from_finished_rows():
    lengths, sampling = OutputLengths(), SamplingParams(max_tokens=1000)
    assert lengths.expected(sampling, 0) == 500
    for _ in range(50):
        lengths.observe(20)
    assert lengths.expected(sampling, 0) == 20
    assert lengths.expected(sampling, 300) == 301
    assert lengths.expected(SamplingParams(max_tokens=1000, ignore_eos=True), 0) == 1000


def test_the_way_out_is_the_cheaper_one_once_both_are_measured():
    costs = Costs(bytes_per_token=1000.0)
    assert choose_way("auto", costs, 500, 4, 100) == "recompute"
    assert choose_way("auto", costs, 5000, 40, 100) == "swap"
    costs.observe_compute(1000, 1.0)
    costs.observe_swap(1_000_000, 0.1)
    assert choose_way("auto", costs, 500, 4, 100) == "swap"
    costs.observe_swap(1_000_000, 1000.0)
    assert choose_way("auto", costs, 5000, 40, 100) == "recompute"
    assert choose_way("swap", costs, 5000, 40, 39) == "recompute"


def test_a_row_whose_last_token_is_pending_is_not_scheduled_again():
    engine = scheduler()
    engine.add(request(0, [5, 6], max_tokens=1))
    engine.add(request(1, [8, 9], max_tokens=2))
    first, land_first = launch(engine)
    assert tokens_of(first) == {0: 2, 1: 2}
    second, land_second = launch(engine)
    assert tokens_of(second) == {1: 1}
    assert launch(engine)[0].items == ()
    assert land_first() == [0]
    assert land_second() == [1]
    assert not engine.has_work


def test_a_row_that_ended_unknown_to_the_next_step_loses_what_that_one_samples():
    engine = scheduler()
    engine.add(Request(0, np.array([5, 6], dtype=np.int32), SamplingParams(max_tokens=9)))
    _, land_first = launch(engine)
    second, land_second = launch(engine)
    assert tokens_of(second) == {0: 1}
    assert land_first(token=2) == [0]
    assert land_second(token=7) == []
    assert engine.counters.output_tokens == 1


def test_a_row_that_left_for_the_host_and_turns_out_to_have_ended_gives_its_places_back():
    engine = scheduler(num_blocks=8, num_host_slots=9, preemption="swap")
    for row_idx in range(2):
        tokens = np.arange(row_idx * 50 + 10, row_idx * 50 + 16, dtype=np.int32)
        engine.add(Request(row_idx, tokens, SamplingParams(max_tokens=14)))
    land = launch(engine)[1]
    finished = []
    while not finished:
        following = launch(engine)[1]
        finished = land(2 if engine.admission.preempted else 7)
        land = following
    assert engine.counters.swap_preemptions == 1
    assert finished == [0, 1]
    assert land() == []
    assert not engine.has_work
    assert engine.blocks.num_free_host_slots == 9


def test_a_row_without_a_token_ends_with_an_error():
    engine = scheduler()
    engine.add(request(5, [5, 6]))
    batch = engine.schedule()
    (row,) = engine.update(batch, Sampled(np.array([NO_TOKEN], np.int32)), find_stop=lambda sequence: None)
    assert (row.row_idx, row.token_ids, row.finish_reason) == (5, (), "error")
    assert row.error.type == "engine_error"
    assert not engine.has_work


def test_a_step_that_had_to_be_split_makes_the_next_ones_smaller():
    engine = scheduler(max_num_batched_tokens=16)
    engine.add(request(0, range(10, 90)))
    batch = engine.schedule()
    engine.update(batch, Sampled(np.empty(0, np.int32), was_split=True), find_stop=lambda sequence: None)
    assert step(engine)[0] == {0: 8}


def test_halves_compute_what_the_step_does():
    engine = scheduler(max_num_batched_tokens=15)
    for row_idx in range(3):
        engine.add(request(row_idx, range(row_idx * 50 + 10, row_idx * 50 + 17)))
    batch = engine.schedule()
    spans = [
        [(item.sequence.request.row_idx, item.start, item.num_tokens, item.samples) for item in half.items]
        for half in batch.halves()
    ]
    assert spans == [[(0, 0, 7, True)], [(1, 0, 7, True), (2, 0, 1, False)]]
    spans = [
        [(item.sequence.request.row_idx, item.start, item.num_tokens, item.samples) for item in half.items]
        for half in batch.halves()[1].halves()
    ]
    assert spans == [[(1, 0, 4, False)], [(1, 4, 3, True), (2, 0, 1, False)]]
