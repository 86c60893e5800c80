"""Whether ways answered with the same tokens, up to float ties: places where the model itself is undecided.

Ways add the same numbers in different orders, so two logits that are nearly equal may change places, and all that
follows is different text. What tells such a place from a mistake is a third program: the plain forward pass of
transformers in float32 over the tokens before it. It is a tie when neither way's token lies further below the likeliest
one than a small distance of logits.
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from batchrun_jobs.bench.measured import Measured
from batchrun_jobs.bench.process import CHILDREN, Processes
from batchrun_jobs.bench.workload import Workload


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where a row's answer first leaves the first way's: `position` in the answer from 0, and the token of each."""

    row: int
    position: int
    expected: int
    found: int


@dataclass(frozen=True, slots=True)
class Question:
    """A place as the judge sees it: the tokens before it and the two that were chosen."""

    ids: tuple[int, ...]
    chosen: tuple[int, int]


# How far the worse of the chosen tokens lies below the likeliest one, of each question; logits.
Judge = Callable[[Sequence[Question]], Sequence[float]]


@dataclass(frozen=True, slots=True)
class Agreement:
    """Of all runs of a way with the first way's first: rows that are equal, that differ by ties, and what is wrong."""

    num_equal: int
    num_ties: int
    wrong: tuple[str, ...]


def compare(
    runs: Mapping[str, Sequence[Measured]], workload: Workload, judge: Judge, tie: float
) -> dict[str, Agreement]:
    """The agreement of each way, the first one included; `tie` is the distance, in logits, that still is one."""
    name, first = next((way, measured[0]) for way, measured in runs.items())
    places = {way: {place for run in measured for place in _places(first, run)} for way, measured in runs.items()}
    asked = sorted(set().union(*places.values()))
    questions = [_question(place, workload, first) for place in asked]
    distances = dict(zip(asked, judge(questions), strict=True))
    judged = {way: {place: distances[place] for place in found} for way, found in places.items()}
    return {way: _agreement(way, runs[way], judged[way], workload, name, tie) for way in runs}


def plain_distances(questions: Sequence[Question], processes: Processes) -> list[float]:
    """The judge: a child that computes the logits. Without a model's folder no place is a tie.

    Raises ChildFailedError.
    """
    if processes.model is None or not questions:
        return [math.inf] * len(questions)
    rows = Workload(("",) * len(questions), tuple(question.ids for question in questions), (1,) * len(questions))
    options = {"candidates": [list(question.chosen) for question in questions]}
    logits = processes.run(CHILDREN / "plain_logits.py", sys.executable, rows, options).returned
    return [largest - min(chosen) for chosen, largest in zip(logits["candidates"], logits["largest"], strict=True)]


def _places(first: Measured, run: Measured) -> Iterator[Place]:
    for row, (expected, found) in enumerate(zip(first.token_ids, run.token_ids, strict=True)):
        # An answer that merely ends early is no place: it is too short.
        for position, (ours, theirs) in enumerate(zip(expected, found, strict=False)):
            if ours != theirs:
                yield Place(row, position, ours, theirs)
                break


def _question(place: Place, workload: Workload, first: Measured) -> Question:
    before = (*workload.prompt_ids[place.row], *first.token_ids[place.row][: place.position])
    return Question(before, (place.expected, place.found))


def _agreement(
    way: str, measured: Sequence[Measured], judged: Mapping[Place, float], workload: Workload, first: str, tie: float
) -> Agreement:
    """`judged` are the way's places with their distances."""
    wrong = {row: message for run in measured for row, message in _short(run, workload)}
    for place, distance in sorted(judged.items()):
        # Written so that NaN is no tie.
        if not distance <= tie:
            wrong.setdefault(
                place.row,
                f"answer token {place.position} is {place.found}, {first} has {place.expected}; one of them is "
                f"{distance:.3g} below the likeliest, more than the {tie:g} of a tie",
            )
    differing = {place.row for place in judged} | set(wrong)
    messages = tuple(f"{way}, row {row}: {message}" for row, message in sorted(wrong.items()))
    return Agreement(workload.num_rows - len(differing), len(differing) - len(wrong), messages)


def _short(run: Measured, workload: Workload) -> Iterator[tuple[int, str]]:
    """Rows with more or fewer tokens than were asked for."""
    for row, (ids, length) in enumerate(zip(run.token_ids, workload.lengths, strict=True)):
        if len(ids) != length:
            yield row, f"{len(ids)} answer tokens instead of {length}"
