"""What a running job has to say: plain facts, in the order they happen.

Knows nothing of terminals or logs; whoever takes them decides what to show.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from batchrun.engine.statistics import Statistics
from batchrun.latency import Latencies, RowTime

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
class RunBegan:
    """A process has loaded the model and begins to run rows, or has workers that do; the limits that they run under.

    The pool of keys and values holds `pool_tokens`; at most `max_num_seqs` rows run at a time, and a step computes at
    most `max_num_batched_tokens`. Of `num_workers` it is what all of them have, but for the step.
    """

    model: str
    pool_tokens: int
    pool_bytes: int
    max_num_seqs: int
    max_num_batched_tokens: int
    shares_prefixes: bool
    is_gpu: bool
    num_workers: int = 1


@dataclass(frozen=True, slots=True)
class RunProgress:
    """The state of the run, over all its processes and restarts unless said otherwise.

    `tokens_done` and `tokens_total` weigh the work: prompt tokens without the shared ones, and output tokens,
    expected ones where a row is unfinished. `elapsed_s`, `statistics`, `latencies`, `slowest` (the slowest row
    first) and `busy_s`, the processor time in seconds, are this process's, or those of all workers that it has.
    """

    rows_done: int
    rows_total: int
    rows_failed: int
    tokens_done: int
    tokens_total: int
    elapsed_s: float
    statistics: Statistics
    latencies: Latencies = field(default_factory=Latencies)
    slowest: tuple[RowTime, ...] = ()
    busy_s: float = 0.0


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
    """The run is over: every row has an answer or an error, or it was asked to stop and can be resumed."""

    how: Literal["completed", "cancelled"]
    rows_done: int
    rows_total: int
    rows_failed: int
    output_tokens: int
    elapsed_s: float


Event = PlanProgress | TuneProgress | RunBegan | RunProgress | Committed | Message | Finished
Observe = Callable[[Event], None]
