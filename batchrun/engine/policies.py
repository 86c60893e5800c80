"""How a step's tokens are shared out: four ways, each the order in which rows get theirs.

The scheduler calls `fill` once a step. No policy changes what a row answers.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

from batchrun.engine.admission import Admission, Terms
from batchrun.engine.lane import Lane
from batchrun.engine.next_step import NextStep
from batchrun.engine.running import Running

Schedule = Literal["chunked", "prefill-first", "fcfs", "static"]

_LOOK_AHEAD = 32  # rows


class Policy(Protocol):
    """Shares out the tokens of a step."""

    def fill(self, step: NextStep, running: Running, admission: Admission) -> None:
        """Gives running and entering sequences tokens of the step, one at least if anybody can take it."""
        ...


@dataclass(frozen=True, slots=True)
class Chunked:
    """Every decode, and chunks of prompts with the rest (Sarathi-Serve, Agrawal et al., OSDI 2024, section 4). Nobody
    waits for a prompt's end, and a step is about as long as another. Long prompts share a `lane`."""

    lane: Lane

    def fill(self, step: NextStep, running: Running, admission: Admission) -> None:
        running.decode(step)
        running.prefill(step, self.lane)
        admission.admit(step, Terms(look_ahead=_LOOK_AHEAD, lane=self.lane))
        running.top_up(step)


class PrefillFirst:
    """Prompts only, until all that may enter are computed whole; only then do decodes go on. The next rows get their
    first token early, and running ones wait for it."""

    def fill(self, step: NextStep, running: Running, admission: Admission) -> None:
        running.prefill(step)
        admission.admit(step, Terms(look_ahead=_LOOK_AHEAD))
        if step.is_empty:
            running.decode(step)


class Fcfs:
    """Strictly by arrival: a row's prompt is computed whole when its turn comes, in a step without decodes, and nobody
    passes a row that does not fit. A prompt longer than a step has steps of its own."""

    def fill(self, step: NextStep, running: Running, admission: Admission) -> None:
        running.prefill(step)
        if step.is_empty:
            admission.admit(step, Terms(is_whole=True))
        if step.is_empty:
            running.decode(step)


class Static:
    """A batch runs to the end of its longest row before the next one begins: the baseline to compare with."""

    def fill(self, step: NextStep, running: Running, admission: Admission) -> None:
        if running:
            running.decode(step)
            running.prefill(step)
        else:
            admission.admit(step, Terms(fills_batch=True))


def make_policy(schedule: Schedule, lane: Lane) -> Policy:
    """The policy of that name; only `chunked` has a lane."""
    match schedule:
        case "chunked":
            return Chunked(lane)
        case "prefill-first":
            return PrefillFirst()
        case "fcfs":
            return Fcfs()
        case "static":
            return Static()
