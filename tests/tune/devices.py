"""Devices that compute nothing and take a known time."""

import numpy as np

from batchrun.engine.echo import EchoRunner
from batchrun.engine.step import Ended, Launched, Sampled, ScheduledBatch
from batchrun.engine.step_time import TERMS, StepSize, StepTimes
from batchrun.observe.events import Event

# A second a step, and less for what is in it: a device whose steps are worth filling.
COSTS = dict.fromkeys(TERMS, 0.0) | {
    "step": 1.0,
    "token": 0.002,
    "token_over_64": 0.01,
    "row": 0.001,
    "kv_token": 1e-6,
    "pair": 1e-7,
    "sampling": 0.05,
    "sampled": 0.003,
}
TIMES = StepTimes.named(COSTS)


class TimedEcho(EchoRunner):
    """The model without weights, on a device whose clock goes on by what each step takes."""

    def __init__(self, num_blocks: int = 4096, block_size: int = 16, *, times: StepTimes = TIMES) -> None:
        super().__init__(num_blocks, block_size)
        self.now_s = 0.0
        self.batches: list[ScheduledBatch] = []
        self._times = times

    def clock(self) -> float:
        return self.now_s

    def launch(self, batch: ScheduledBatch) -> Ended:
        self.batches.append(batch)
        self.now_s += self._times.seconds(StepSize.of(batch))
        return super().launch(batch)


class Queued:
    """A device that computes on its own, steps one after another, while the host does something else."""

    block_size, num_blocks, num_host_slots, block_bytes = 16, 4096, 0, 128
    is_gpu = overlaps = True

    def __init__(self, host_s: float) -> None:
        """A launch takes the host `host_s`."""
        self.now_s = 0.0
        self.busy_until_s = 0.0
        self._host_s = host_s

    def clock(self) -> float:
        return self.now_s

    def launch(self, batch: ScheduledBatch) -> Launched:
        self.now_s += self._host_s
        self.busy_until_s = max(self.now_s, self.busy_until_s) + TIMES.seconds(StepSize.of(batch))
        return _Queued(self, self.busy_until_s, len(batch.sampled))


class _Queued:
    def __init__(self, device: Queued, ends_s: float, num_sampled: int) -> None:
        self._device = device
        self._ends_s = ends_s
        self._num_sampled = num_sampled

    def wait(self) -> Sampled:
        self._device.now_s = max(self._device.now_s, self._ends_s)
        return Sampled(np.zeros(self._num_sampled, dtype=np.int32))


def ignore(event: Event) -> None:
    """Nobody watches."""
