"""A whole benchmark: the ways by turns, the machine's rates between them, and whether the answers agree."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from batchrun_jobs.bench import agreement, floor
from batchrun_jobs.bench.agreement import Agreement
from batchrun_jobs.bench.floor import Floor, Rates
from batchrun_jobs.bench.measured import Measured, measure
from batchrun_jobs.bench.process import ChildFailedError, Processes
from batchrun_jobs.bench.way import Way
from batchrun_jobs.bench.workload import Workload

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The runs of the ways that ended well, how each agrees with the first, and a line for each way that failed.

    `floor` is None for a model whose floor is not known.
    """

    runs: dict[str, list[Measured]]
    agreements: dict[str, Agreement]
    floor: Floor | None
    failed: tuple[str, ...]

    @property
    def complaints(self) -> tuple[str, ...]:
        """Everything for which the benchmark as a whole fails."""
        wrong = (line for found in self.agreements.values() for line in found.wrong)
        return (*self.failed, *wrong)


def compare(
    ways: Sequence[Way], workload: Workload, processes: Processes, *, repeat: int, tie: float, say: Say
) -> Comparison:
    """Runs each way `repeat` times; `say` hears of each run. Two answers that part at a `tie`, in logits, are equal.

    Raises ChildFailedError when the rates or the logits cannot be computed.
    """
    decoder = None if processes.model is None else floor.read_decoder(processes.model)
    rates: list[Rates] = []
    pause = (lambda: rates.append(floor.measure_rates(processes))) if decoder is not None else lambda: None
    runs, failed = _run(ways, workload, processes, repeat, pause, say)
    found = Floor(floor.least(workload, decoder), tuple(rates)) if decoder is not None else None
    judge = partial(agreement.plain_distances, processes=processes)
    agreements = agreement.compare(runs, workload, judge, tie) if runs else {}
    return Comparison(runs, agreements, found, failed)


def _run(
    ways: Sequence[Way],
    workload: Workload,
    processes: Processes,
    repeat: int,
    pause: Callable[[], None],
    say: Say,
) -> tuple[dict[str, list[Measured]], tuple[str, ...]]:
    """The runs, and a line for each way that failed; such a way is not tried again, and its runs are left out.

    A B A B ..., so that a machine that slows down meanwhile slows all of them, with a `pause` around each A B.
    """
    runs: defaultdict[str, list[Measured]] = defaultdict(list)
    failed: dict[str, str] = {}
    pause()
    for _ in range(repeat):
        for way in ways:
            if way.label in failed:
                continue
            try:
                run = measure(way, workload, processes)
            except ChildFailedError as error:
                failed[way.label] = f"{way.label} failed: {error}"
                continue
            runs[way.label].append(run)
            say(f"{way.label}: {run.run_s:.2f} s, ready after {run.ready_s:.1f} s")
        pause()
    return {label: measured for label, measured in runs.items() if label not in failed}, tuple(failed.values())
