"""Equal, a tie, or wrong: and if wrong, where."""

import math
from collections.abc import Sequence

import pytest

from batchrun_jobs.bench.agreement import Agreement, Question, compare
from batchrun_jobs.bench.measured import Measured
from tests.bench.conftest import workload

WORK = workload([[10, 11], [20], [30, 31, 32]], [3, 3, 2])
ANSWERS = ([1, 2, 3], [4, 5, 6], [7, 8])


def answered(*token_ids: Sequence[int]) -> Measured:
    return Measured(1.0, 1.0, tuple(map(tuple, token_ids)), None, None, None, None)


class Judge:
    """Says the same distance of every question, and keeps them."""

    def __init__(self, distance: float) -> None:
        self.distance = distance
        self.asked: list[Question] = []

    def __call__(self, questions: Sequence[Question]) -> list[float]:
        self.asked += questions
        return [self.distance] * len(questions)


def compared(judge: Judge, *runs: Measured) -> Agreement:
    return compare({"ours": [answered(*ANSWERS)], "theirs": runs}, WORK, judge, tie=0.001)["theirs"]


def test_equal_answers_ask_nobody() -> None:
    judge = Judge(math.inf)
    assert compared(judge, answered(*ANSWERS)) == Agreement(3, 0, ())
    assert judge.asked == []


def test_a_tie_is_judged_at_the_first_difference_behind_the_tokens_before_it() -> None:
    judge = Judge(0.001)
    assert compared(judge, answered([1, 2, 3], [4, 9, 9], [7, 8])) == Agreement(2, 1, ())
    assert judge.asked == [Question((20, 4), (5, 9))]


@pytest.mark.parametrize("distance", [0.0011, math.inf, math.nan])
def test_what_is_no_tie_is_named_by_row_and_position(distance: float) -> None:
    found = compared(Judge(distance), answered([1, 2, 3], [4, 5, 6], [7, 9]))
    assert (found.num_equal, found.num_ties) == (2, 0)
    (line,) = found.wrong
    assert line.startswith("theirs, row 2: answer token 1 is 9, ours has 8; ")


def test_every_run_of_a_way_counts() -> None:
    judge = Judge(math.inf)
    found = compared(judge, answered(*ANSWERS), answered([1, 2, 3], [4, 5, 6], [0, 8]))
    assert [line.partition(":")[0] for line in found.wrong] == ["theirs, row 2"]


def test_the_first_way_is_compared_with_itself() -> None:
    runs = {"ours": [answered(*ANSWERS), answered([1, 2, 0], *ANSWERS[1:])]}
    found = compare(runs, WORK, Judge(1.0), tie=0.001)["ours"]
    assert (found.num_equal, len(found.wrong)) == (2, 1)


def test_an_answer_that_ends_early_is_wrong_however_near_a_tie() -> None:
    found = compared(Judge(0.0), answered([1, 2], [4, 9, 9], [7, 8]))
    assert found == Agreement(1, 1, ("theirs, row 0: 2 answer tokens instead of 3",))
