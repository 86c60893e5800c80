"""What the process that holds a job, the driver, and its workers tell each other.

A worker is told its brief, then gets leases; it hands in answers, tokens of unfinished rows and how it goes. Rows and
answers travel as Arrow streams, so that a worker needs no file of the job folder.
"""

from dataclasses import dataclass, field

import pyarrow as pa

from batchrun.errors import BatchrunError
from batchrun.job import Job
from batchrun.observe.events import RunBegan
from batchrun.plan.plan import PlanSummary
from batchrun.tally import EngineReport


@dataclass(frozen=True, slots=True)
class Brief:
    """All that a worker needs to begin. Its model must have the `digest`, and its batchrun be of the `version`.

    It computes on the GPU `device_index` of those that it sees, and shares its host's memory with `num_sharing` workers
    in all. `log_level`: what it logs from there on is the driver's to say.
    """

    job: Job
    plan: PlanSummary
    digest: str
    version: str
    device_index: int = 0
    num_sharing: int = 1
    log_level: int = 0


@dataclass(frozen=True, slots=True)
class LeasedUnit:
    """Rows of a unit to run: an Arrow stream of `PENDING_SCHEMA`."""

    unit: int
    rows: bytes


@dataclass(frozen=True, slots=True)
class Lease:
    """Rows to run, in this order; behind what some of them have generated, and how many processes ended with them.

    The worker asks for more when fewer than `num_ahead` wait in its engine.
    """

    units: tuple[LeasedUnit, ...]
    num_ahead: int
    output_ids: dict[int, tuple[int, ...]] = field(default_factory=dict)
    num_given_up: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stop:
    """Somebody wants the job to stop; `level` as in `StopRequest`."""

    level: int


@dataclass(frozen=True, slots=True)
class Over:
    """There is nothing more to run."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker has loaded the model."""

    began: RunBegan


@dataclass(frozen=True, slots=True)
class Wants:
    """The worker has room for more rows; says so once, until it gets some."""


@dataclass(frozen=True, slots=True)
class Answered:
    """The answers of `rows` of a unit, and of their duplicates: an Arrow stream of the task's columns."""

    unit: int
    rows: tuple[int, ...]
    table: bytes


@dataclass(frozen=True, slots=True)
class Unfinished:
    """What rows have generated so far."""

    rows: dict[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Working:
    """How it goes."""

    engine: EngineReport


@dataclass(frozen=True, slots=True)
class Said:
    """A line of the worker's log; `level` is logging's."""

    level: int
    text: str


@dataclass(frozen=True, slots=True)
class Stuck:
    """A step with these rows does not end, see the `dump`; the worker waits to be ended."""

    rows: tuple[int, ...]
    timeout_s: float
    dump: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The worker's last word; `error` is what ended it before its work did."""

    error: BatchrunError | None = None


@dataclass(frozen=True, slots=True)
class Lost:
    """No word of the worker's, but of whoever looks after it: it is gone. `has_crashed`: for a reason of its own."""

    reason: str
    has_crashed: bool


ToWorker = Lease | Stop | Over
FromWorker = Ready | Wants | Answered | Unfinished | Working | Said | Stuck | Ended


def packed(table: pa.Table) -> bytes:
    """The table as an Arrow stream, without what a slice of a larger one leaves out."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return bytes(sink.getvalue())


def unpacked(stream: bytes) -> pa.Table:
    """What `packed` made a stream of."""
    return pa.ipc.open_stream(stream).read_all()
