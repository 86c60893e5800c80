"""A library that only writes down what the commands ask of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from click.testing import Result

from batchrun.errors import NotMeasured
from batchrun.job import Job
from batchrun.observe.events import Observe
from batchrun.outcome import Outcome
from batchrun.stop import StopRequest

Run = Callable[..., Result]


@dataclass
class Library(ModuleType):
    """Stands for `batchrun.lifecycle` and `batchrun.planning`. `outcome` is what a job ends with, or what it raises."""

    outcome: Outcome | BaseException
    made: object = None
    done: int = 0
    estimated: object = None
    fleet: object = None
    simulated: list[tuple[str | None, tuple[int, ...], float | None]] = field(default_factory=list)
    not_measured: NotMeasured | None = None
    tuned: object = None
    tuned_for: list[tuple[Job, object, bool]] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    resumed: list[Path] = field(default_factory=list)
    during: Callable[[Observe, StopRequest], None] = lambda observe, stop: None

    def plan(self, job: Job, observe: Observe, stop: StopRequest) -> object:
        self.jobs.append(job)
        self.during(observe, stop)
        return self.made

    def num_done(self, job: Job) -> int:
        return self.done

    def estimate(self, job: Job, plan: object) -> object:
        assert plan is self.made
        return self.estimated

    def how_to_estimate(self, job: Job) -> str | None:
        return "batchrun tune echo"

    def find_device(self, job: Job, name: str | None) -> object:
        assert not self.simulated, "asked when the plan was made already"
        if self.not_measured is not None:
            raise self.not_measured
        self.simulated.append((name, (), None))
        return name or "this device"

    def simulate(
        self, job: Job, plan: object, device: object, workers: tuple[int, ...], cost_per_hour: float | None
    ) -> object:
        assert plan is self.made
        self.simulated[-1] = (self.simulated[-1][0], workers, cost_per_hour)
        return self.fleet

    def tune(self, job: Job, weights: object, is_quick: bool, observe: Observe) -> object:
        self.tuned_for.append((job, weights, is_quick))
        self.during(observe, StopRequest())
        return self.tuned

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
