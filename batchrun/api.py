"""batchrun from Python: `plan` and `submit`, and over tables `generate`, `score`, `choose` and `embed`.

Keyword arguments are the command's options.

import batchrun as br
job = br.submit("tickets.parquet", output="out/triage", template="{{ body }}", max_tokens=64)
answers = br.generate(dataset, prompt_col="text", max_tokens=64)
"""

import logging
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from batchrun import frames, lifecycle, planning
from batchrun.checkpoint import cache_folder
from batchrun.errors import UsageError
from batchrun.interrupts import draining_on_interrupt
from batchrun.job import Job
from batchrun.observe.events import Event, Observe
from batchrun.observe.progress import BarProgress, has_room_for_bar
from batchrun.option_types import TaskName
from batchrun.outcome import Outcome
from batchrun.plan.plan import Plan
from batchrun.stop import StopRequest

Inputs = str | Path | Sequence[str | Path]
T = TypeVar("T")


def plan(inputs: Inputs, *, output: str | Path | None = None, observe: Observe | None = None, **options: Any) -> Plan:
    """Reads, renders, tokenises and sorts `inputs` and writes the plan beside `output`; loads no weights.

    Without `output` only the summary is of use: the units were written to a temporary folder. `options` are the
    command's, with underscores. Raises BatchrunError as the command would.
    """
    if output is None:
        with _temporary_folder() as folder:
            return plan(inputs, output=folder / "out", observe=observe, **options)
    with _watched(observe) as watched:
        return planning.plan(_job(inputs, output, options), watched, StopRequest())


def submit(inputs: Inputs, *, output: str | Path, observe: Observe | None = None, **options: Any) -> Outcome:
    """Runs a job to its end, or goes on with it; the result is the Parquet dataset at `output`.

    `options` are the command's, with underscores. Ctrl-C, or a notebook's interrupt, is what it is to the command: the
    running rows finish or are saved, and the same call goes on. Raises BatchrunError as the command would:
    StoppedByUser then, and also when more rows failed than `max_error_rate` allows, or all of them, though the
    result is there.
    """
    job, stop = _job(inputs, output, options), StopRequest()
    with _watched(observe) as watched, draining_on_interrupt(stop):
        outcome = lifecycle.submit(job, watched, stop)
    outcome.check_budget()
    return outcome


def generate(dataset: T, *, observe: Observe | None = None, **options: Any) -> T:
    """The rows of `dataset` with their answers: a pandas DataFrame, datasets.Dataset or pyarrow.Table, as it came.

    Works in a temporary folder, so nothing is resumed. A path instead of a table needs an `output`; then it is what
    `submit` does, and that path comes back. `options` are the command's, with underscores. Raises BatchrunError as the
    command would: also when more rows failed than `max_error_rate` allows, or all of them.
    """
    return _answered(dataset, "generate", observe, options)


def score(dataset: T, *, observe: Observe | None = None, **options: Any) -> T:
    """The rows of `dataset` with the log-likelihood of their `target_col` behind their prompt; otherwise as
    `generate`."""
    return _answered(dataset, "score", observe, options)


def choose(dataset: T, *, observe: Observe | None = None, **options: Any) -> T:
    """The rows of `dataset` with the likeliest of `choice` (a list of texts) or of their `choices_col`; otherwise as
    `generate`."""
    return _answered(dataset, "choose", observe, options)


def embed(dataset: T, *, observe: Observe | None = None, **options: Any) -> T:
    """The rows of `dataset` with an embedding each; otherwise as `generate`."""
    return _answered(dataset, "embed", observe, options)


def _answered(dataset: T, task: TaskName, observe: Observe | None, options: dict[str, Any]) -> T:
    for name in ("partition_by", "order"):
        if options.get(name) not in (None, "input"):
            raise UsageError(f"{task}() gives the rows back in their order; {name} is for submit()")
    if options.get("task", task) != task:
        raise UsageError(f"{task}() is for no other task; leave out task={options['task']!r}")
    options = {**options, "task": task}
    if isinstance(dataset, str | Path):
        return _answered_file(dataset, observe, options)
    if "output" in options:
        raise UsageError(f"{task}() gives a table back; output is for paths, and for submit()")
    with _temporary_folder() as folder, _watched(observe) as watched:
        frames.write(dataset, folder / "input.parquet")
        job = _job(folder / "input.parquet", folder / "out", options)
        outcome = lifecycle.submit(job, watched, StopRequest())
        answered = frames.read_like(dataset, folder / "out", job.output_prefix)
        if outcome.errors:
            outcome.check_budget(f"the first: {frames.first_error(folder / 'out', job.output_prefix)}")
        return answered


def _answered_file(path: T, observe: Observe | None, options: dict[str, Any]) -> T:
    """The path of the result, as a str or a Path like `path`."""
    if "output" not in options:
        raise UsageError(f"{options['task']}() of a path needs an output, the path of the result")
    return type(path)(submit(path, observe=observe, **options).output)  # type: ignore[arg-type, call-arg]


def _job(inputs: Inputs, output: str | Path, options: dict[str, Any]) -> Job:
    return Job.load({"inputs": tuple(map(str, _paths(inputs))), "output": str(output), **options})


def _paths(inputs: Inputs) -> list[str | Path]:
    """Raises UsageError for what is no path: a table would otherwise be taken for the names of its columns."""
    if isinstance(inputs, str | Path):
        return [inputs]
    several = list(inputs) if isinstance(inputs, Sequence | Iterator) else None
    strange: list[object] = (
        [inputs] if several is None else [each for each in several if not isinstance(each, str | Path)]
    )
    if strange or several is None:
        raise UsageError(
            f"plan() and submit() take paths of files, not {type(strange[0]).__name__}; for tables use generate(), "
            "or write one to Parquet first"
        )
    return several


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    """A folder in the user's cache that is gone afterwards."""
    cache_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_folder(), prefix="job-") as folder:
        yield Path(folder)


@contextmanager
def _watched(observe: Observe | None) -> Iterator[Observe]:
    """`observe`; without one, a bar where somebody sees it: in a notebook or on a terminal."""
    if observe is not None or not (_is_notebook() or has_room_for_bar(sys.stderr)):
        yield observe or _ignore
        return
    # Imported here: it looks for a notebook, and brings asyncio.
    from tqdm.auto import tqdm

    bar = BarProgress(sys.stderr, logging.getLogger("batchrun"), tqdm)
    try:
        yield bar
    finally:
        bar.close()


def _is_notebook() -> bool:
    """Whether this is the process behind a notebook; it has imported the kernel long since."""
    application = getattr(sys.modules.get("ipykernel.kernelapp"), "IPKernelApp", None)
    return application is not None and bool(application.initialized())


def _ignore(event: Event) -> None:
    """Nobody is watching."""
