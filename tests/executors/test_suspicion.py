"""Rows that a worker was lost with run alone, behind all others, until they are answered."""

from batchrun.executors.suspicion import Suspicion


def place_of(row: int) -> int | None:
    """Row 9 is done."""
    return None if row == 9 else row * 10


def test_pending_rows_under_suspicion_wait_in_the_order_of_the_plan() -> None:
    suspicion = Suspicion({3: 1, 9: 2, 1: 1}, place_of)
    assert suspicion.waiting == (10, 30)
    assert [suspicion.take(worker).tolist() for worker in range(3)] == [[10], [30], []]
    assert suspicion.waiting == ()


def test_a_suspect_is_over_when_its_own_worker_has_answered_it() -> None:
    suspicion = Suspicion({1: 1}, place_of)
    suspicion.take(4)
    assert suspicion.acquit(5, [20, 30]) == [20, 30]
    assert (suspicion.is_with(4), suspicion.is_with(5), suspicion.is_over) == (True, False, False)
    assert suspicion.acquit(4, [10]) == []
    assert (suspicion.is_with(4), suspicion.is_over) == (False, True)


def test_a_worker_that_is_gone_leaves_its_suspect_and_makes_new_ones() -> None:
    suspicion = Suspicion({1: 1}, place_of)
    suspicion.take(4)
    assert suspicion.leave(4, [10]) == set()
    assert suspicion.waiting == (10,)
    assert suspicion.leave(5, [50, 20]) == {20, 50}
    assert suspicion.waiting == (10, 20, 50)
    assert suspicion.leave(6, []) == set()


def test_workers_are_counted_for_each_row() -> None:
    loaded = {3: 1}
    suspicion = Suspicion(loaded, place_of)
    suspicion.blame([3, 5])
    assert (dict(suspicion.num_given_up), loaded) == ({3: 2, 5: 1}, {3: 1})


def test_without_suspects_all_is_over() -> None:
    assert Suspicion({}, place_of).is_over
