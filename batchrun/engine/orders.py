"""What ranks say to each other: rank 0 what is to be done, the others that they are there, or why they end."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchrun.engine.batch import StepIntegers
from batchrun.engine.runner_options import RunnerOptions
from batchrun.engine.step import SwapIn, SwapOut

if TYPE_CHECKING:
    from batchrun.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class Ready:
    """The process runs, and will do as it is told."""


@dataclass(frozen=True, slots=True)
class Start:
    """Be this rank. Others are met through the store at `port`; `num_threads` None: as many as there are."""

    rank: int
    port: int
    device_type: str
    num_threads: int | None
    checkpoint: "Checkpoint"
    options: RunnerOptions


@dataclass(frozen=True, slots=True)
class Failed:
    """The rank ends; `at` is the machine's monotonic clock, seconds."""

    message: str
    at: float


@dataclass(frozen=True, slots=True)
class Logits:
    """`Shards.logits`."""

    step: StepIntegers


@dataclass(frozen=True, slots=True)
class Hidden:
    """`Shards.hidden`."""

    step: StepIntegers


@dataclass(frozen=True, slots=True)
class Head:
    """`Shards.head`, of hidden states that rank 0 sends next through the group."""

    shape: tuple[int, ...]  # num, hidden_size


Order = SwapOut | SwapIn | Logits | Hidden | Head
