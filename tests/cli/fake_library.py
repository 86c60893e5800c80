"""A library that only writes down what the commands ask of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from click.testing import Result

from batchrun.job import Job
from batchrun.observe.events import Observe
from batchrun.outcome import Outcome
from batchrun.stop import StopRequest

Run = Callable[..., Result]


@dataclass
class Library(ModuleType):
    """Stands for `batchrun.lifecycle`. `outcome` is what a job ends with, or what it raises."""

    outcome: Outcome | BaseException
    made: object = None
    jobs: list[Job] = field(default_factory=list)
    resumed: list[Path] = field(default_factory=list)
    during: Callable[[Observe, StopRequest], None] = lambda observe, stop: None

    def plan(self, job: Job, observe: Observe) -> object:
        self.jobs.append(job)
        self.during(observe, StopRequest())
        return self.made

    def submit(self, job: Job, observe: Observe, stop: StopRequest) -> Outcome:
        self.jobs.append(job)
        self.during(observe, stop)
        return self._end()

    def resume(self, output: Path, observe: Observe, stop: StopRequest) -> Outcome:
        self.resumed.append(output)
        self.during(observe, stop)
        return self._end()

    def _end(self) -> Outcome:
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome
