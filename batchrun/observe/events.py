"""What a running job has to say: plain facts, in the order they happen.

Knows nothing of terminals or logs; whoever takes them decides what to show.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from batchrun.latency import Latencies

Level = Literal["debug", "info", "warning"]


@dataclass(frozen=True, slots=True)
class PlanProgress:
    """Planning so far: `rows` of the input rendered and tokenised, or, after that, put in order; the last of a stage
    says so. Rows that cannot run are put in no order.
    """

    rows: int
    stage: Literal["render", "order"] = "render"
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class TuneProgress:
    """Measuring so far: `steps` of `steps_total` were timed, or passed over for lack of time."""

    steps: int
    steps_total: int

    @property
    def is_last(self) -> bool:
        return self.steps == self.steps_total


@dataclass(frozen=True, slots=True)
class RunProgress:
    """The state of the run, over all its processes and restarts unless said otherwise.

    `tokens_done` and `tokens_total` weigh the work: prompt tokens without the shared ones, and output tokens,
    expected ones where a row is unfinished. `hit_rate` and `kv_usage` are shares of 1. `preemptions`,
    `num_running`, `elapsed_s`, `output_tokens` and `latencies` are this process's.
    """

    rows_done: int
    rows_total: int
    rows_failed: int
    tokens_done: int
    tokens_total: int
    hit_rate: float
    kv_usage: float
    preemptions: int
    num_running: int
    elapsed_s: float
    output_tokens: int
    latencies: Latencies = field(default_factory=Latencies)


@dataclass(frozen=True, slots=True)
class Committed:
    """`rows` finished rows of a unit are on disk in the part of this file name."""

    unit: int
    part: str
    rows: int


@dataclass(frozen=True, slots=True)
class Message:
    """Something a person should know; one line."""

    level: Level
    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The run is over: every row is `completed`, or it `stopped` and can be resumed."""

    how: Literal["completed", "stopped"]
    rows_done: int
    rows_total: int
    rows_failed: int
    output_tokens: int
    elapsed_s: float


Event = PlanProgress | TuneProgress | RunProgress | Committed | Message | Finished
Observe = Callable[[Event], None]
