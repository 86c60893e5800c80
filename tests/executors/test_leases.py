"""Who runs which rows, without anybody who runs them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchrun.leases import Leases, Portion

MOST_ROWS = 60


def groups(num_groups: int, num_rows: int, shared_len: int, num_workers: int, work: int = 10) -> Leases:
    """A plan of so many groups of rows that share a prefix within the group."""
    shared = np.full(num_groups * num_rows, shared_len, dtype=np.int32)
    shared[::num_rows] = 0
    return Leases(shared, np.full(num_groups * num_rows, work, dtype=np.int64), num_workers)


def take_all(leases: Leases, worker: int, num_rows: int = 5) -> list[int]:
    """What a worker is leased when it finishes at once and nobody else does anything."""
    taken = []
    while len(places := leases.take(worker, num_rows)):
        leases.finish(worker, places.tolist())
        taken += places.tolist()
        leases.check()
    return taken


@st.composite
def plans(draw):
    rows = st.integers(0, 1000)
    shared = draw(st.lists(rows, max_size=MOST_ROWS))
    work = draw(st.lists(rows, min_size=len(shared), max_size=len(shared)))
    return Leases(np.array(shared, dtype=np.int32), np.array(work, dtype=np.int64), draw(st.integers(1, 5)))


DEEDS = st.lists(
    st.tuples(st.sampled_from(["join", "take", "take", "take", "finish", "finish", "leave"]), st.integers(0, 10**6)),
    max_size=80,
)


@given(plans(), DEEDS)
def test_each_row_is_finished_once_whoever_joins_and_leaves(leases, deeds):
    """A row is with one worker at a time, and with none that was not leased it."""
    finished: list[int] = []
    num_rows, joined = leases.num_left, 0
    for deed, chance in deeds:
        worker = leases.workers[chance % len(leases.workers)] if leases.workers else None
        match deed:
            case "join":
                leases.join(joined)
                joined += 1
            case "take" if worker is not None:
                others = {place for other in leases.workers for place in leases.held(other).tolist()}
                assert not others & {*leases.take(worker, 1 + chance % 7).tolist()}
            case "finish" if worker is not None:
                done = [place for place in leases.held(worker).tolist() if (place + chance) % 2]
                leases.finish(worker, done)
                finished += done
            case "leave" if worker is not None:
                held = leases.held(worker)
                assert leases.leave(worker).tolist() == sorted(held.tolist())
        leases.check()
    for worker in leases.workers:
        leases.leave(worker)
    leases.join(joined)
    finished += take_all(leases, joined)
    assert sorted(finished) == list(range(num_rows))
    assert leases.num_left == 0


@given(plans())
def test_one_worker_runs_the_stretches_from_their_beginnings(leases):
    leases.join(0)
    taken = take_all(leases, 0)
    assert sorted(taken) == list(range(len(taken)))


def test_what_shares_a_prefix_stays_together():
    """Seven groups for three workers: nobody has a part of one."""
    leases = groups(7, 30, shared_len=500, num_workers=3)
    owners = {}
    for worker in range(3):
        leases.join(worker)
        owners[worker] = leases.take(worker, 1000)
        assert len(owners[worker]) % 30 == 0
        assert owners[worker][0] % 30 == 0
    assert sorted(map(len, owners.values())) == [60, 60, 90]
    assert sorted(np.concatenate([*owners.values()]).tolist()) == list(range(210))


def test_parts_are_of_equal_work_where_nothing_is_shared():
    leases = Leases(np.zeros(100, dtype=np.int32), np.arange(100), 4)
    work = []
    for worker in range(4):
        leases.join(worker)
        work.append(int(leases.take(worker, 100).sum()))
    assert sum(work) == 4950
    assert max(work) - min(work) < 200


def test_a_worker_without_work_takes_the_farther_half_of_the_largest_stretch():
    leases = groups(8, 10, shared_len=100, num_workers=1)
    leases.join(0)
    leases.take(0, 4)
    leases.join(1)
    assert leases.take(1, 10).tolist() == list(range(40, 50))
    assert leases.stretches()[0].tolist() == list(range(4, 40))
    assert leases.stretches()[1].tolist() == list(range(50, 80))


def test_a_prefix_is_not_computed_again_for_less_than_its_length():
    leases = groups(1, 10, shared_len=1000, num_workers=1)
    leases.join(0)
    leases.take(0, 2)
    leases.join(1)
    assert leases.take(1, 10).tolist() == []
    assert len(leases.take(0, 10)) == 8


def test_one_group_is_shared_out_when_its_rows_are_much_work():
    leases = groups(1, 100, shared_len=1000, num_workers=2, work=100)
    for worker in (0, 1):
        leases.join(worker)
        assert len(leases.take(worker, 1000)) == 50


def test_what_a_dead_worker_had_goes_to_others_in_the_order_of_the_plan():
    leases = groups(4, 10, shared_len=100, num_workers=2)
    leases.join(0)
    leases.join(1)
    held = leases.take(0, 6)
    leases.take(1, 20)
    leases.finish(0, held[[0, 3]].tolist())
    assert leases.leave(0).tolist() == [1, 2, 4, 5]
    assert leases.take(1, 100).tolist() == [1, 2, 4, 5, *range(6, 20)]


def test_rows_that_are_kept_back_go_to_nobody():
    leases = groups(1, 4, shared_len=0, num_workers=1)
    leases.join(0)
    leases.take(0, 3)
    leases.leave(0, keep_back=[1, 2])
    leases.join(1)
    assert take_all(leases, 1) == [0, 3]
    assert leases.num_left == 0


@pytest.mark.parametrize("num_workers", [1, 2, 5])
def test_workers_that_go_at_one_pace_compute_hardly_any_prefix_twice(num_workers):
    """Of the prompt tokens that one worker finds computed, they find 97 % and more."""
    rng = np.random.default_rng(3)
    shared = np.where(np.arange(2000) % 40 == 0, 0, np.where(np.arange(2000) % 5 == 0, 200, 300)).astype(np.int32)
    leases = Leases(shared, rng.integers(20, 120, size=2000), num_workers)
    last = dict.fromkeys(range(num_workers), -2)
    hits = 0
    for worker in last:
        leases.join(worker)
    while leases.num_left:
        for worker in last:
            places = leases.take(worker, 16)
            for place in places.tolist():
                hits += int(shared[place]) if place == last[worker] + 1 else 0
                last[worker] = place
            leases.finish(worker, places.tolist())
    assert hits >= 0.97 * shared.sum()


def test_the_less_is_left_the_less_a_worker_is_leased_and_the_fewer_wait_with_it():
    left = [10_000, 256, 128, 100, 30, 4, 1, 0]
    portions = [Portion.of(num_open, 2) for num_open in left]
    assert [portion.num_rows for portion in portions] == [32, 32, 32, 25, 8, 8, 8, 8]
    assert [portion.num_ahead for portion in portions] == [64, 64, 32, 25, 7, 1, 1, 1]


def test_a_worker_that_is_the_only_one_has_as_much_as_ever():
    assert Portion.of(3, 1) == Portion.of(10_000, 1) == Portion(32, 64)


@given(plans(), st.integers(1, 5))
def test_open_rows_are_those_that_nobody_was_leased(leases, num_rows):
    assert leases.num_open == leases.num_left
    leases.join(0)
    held = len(leases.take(0, num_rows))
    assert leases.num_open == leases.num_left - held


def test_no_rows_are_no_work():
    leases = Leases(np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int64), 3)
    leases.join(0)
    assert leases.take(0, 4).tolist() == []
    assert leases.num_left == 0
