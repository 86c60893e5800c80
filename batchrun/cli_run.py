"""The commands that work: plan, submit, resume. Each is: load, one library call, report.

The library is imported when a command runs, not for its `--help`.
"""

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from batchrun.cli import complain
from batchrun.cli_options import (
    Console,
    JobCommand,
    console_options,
    job_options,
    load_console,
    load_job,
    load_simulating,
    plan_options,
)
from batchrun.cli_report import plan_as_dict, plan_text, summary_text
from batchrun.cli_signals import stopping_on_signals
from batchrun.errors import DataError, NotMeasured
from batchrun.observe.events import Observe
from batchrun.observe.log import LOGGER, logging_to
from batchrun.observe.progress import make_observer
from batchrun.outcome import Outcome
from batchrun.plan.sharing import decide
from batchrun.stop import StopRequest
from batchrun.store.at_hand import named


@click.command(cls=JobCommand, params=plan_options())
def plan(**given: Any) -> None:
    """Read, tokenise and sort the input; show what would run.

    Writes the plan, which submit takes. Needs no accelerator and loads no weights.
    INPUT and options are those of submit. With --simulate it also says what the plan takes so many workers;
    where batchrun tune has not measured the model, that part is missing and the exit code is 2.

    \b
    Example:
      batchrun plan reviews.parquet --prompt-col body -o out/reviews
      batchrun plan reviews.parquet --prompt-col body -o out/reviews --simulate 1..64
    """
    console, job, simulating = load_console(given), load_job(given), load_simulating(given)

    from batchrun import planning

    stop, wanted = StopRequest(), simulating.simulate
    with talking(console) as observe:
        device, missing = None, None
        try:
            # Before the plan is made, which may take long.
            device = None if wanted is None else planning.find_device(job, wanted.device)
        except NotMeasured as error:
            missing = error
        with stopping_on_signals(stop):
            made = planning.plan(job, observe, stop)
        estimate, sharing = planning.estimate(job, made), decide(job.prefix_caching, made.summary)
        num_done = planning.num_done(job)
        fleet = None
        if wanted is not None and device is not None:
            fleet = planning.simulate(job, made, device, wanted.workers, simulating.cost_per_hour)
    if console.json:
        # One object, behind everything else that is said.
        exit_code = 0 if missing is None else complain(missing)
        click.echo(json.dumps(plan_as_dict(made, estimate, sharing, fleet, num_done)))
        sys.exit(exit_code)
    how = planning.how_to_estimate(job)
    click.echo(plan_text(made, estimate, sharing, fleet, how, num_done))
    sys.exit(0 if missing is None else complain(missing))


@click.command(cls=JobCommand, params=job_options())
def submit(**given: Any) -> None:
    """Plan, run and publish; the same command again resumes.

    INPUT is a Parquet, JSON Lines or CSV file, a folder of them, or a glob in quotes. The prompt is what --prompt-col,
    --messages-col or --template says; with none of them, the column called prompt, messages or text.

    Works in the foreground and prints the folder of the result. A complete job is left as it is.

    An option may also be a variable, such as BATCHRUN_MAX_TOKENS=64, or a line of a TOML file, such as max-tokens = 64.

    \b
    Example:
      batchrun submit reviews.parquet --prompt-col body --max-tokens 64 -o out/reviews
    """
    console, job = load_console(given), load_job(given)

    from batchrun import lifecycle

    run_job(console, lambda observe, stop: lifecycle.submit(job, observe, stop))


@click.command(cls=JobCommand, params=[click.Argument(["output"], metavar="OUT"), *console_options()])
def resume(output: str, **given: Any) -> None:
    """Go on with the job of OUT as it was stored.

    \b
    Example:
      batchrun resume out/reviews
    """
    console = load_console(given)

    from batchrun import lifecycle

    run_job(console, lambda observe, stop: lifecycle.resume(absolute(named(output)), observe, stop))


def absolute(output: Path | str) -> Path | str:
    """A path from the root; a URL as it is."""
    return output.absolute() if isinstance(output, Path) else output


def run_job(console: Console, work: Callable[[Observe, StopRequest], Outcome], *, is_retry: bool = False) -> None:
    """Runs a job and reports; exits 65 when too many rows failed, unless it is a retry that found nothing to do."""
    stop = StopRequest()
    with talking(console) as observe:
        with stopping_on_signals(stop):
            outcome = work(observe, stop)
        if is_retry and not outcome.retried:
            LOGGER.info("no row matches; nothing was run")
            exit_code = 0
        else:
            exit_code = _report(console, outcome)
    # Last of all, so that a script that merges the streams finds the result in the last line.
    click.echo(json.dumps(outcome.as_dict()) if console.json else str(outcome.output))
    sys.exit(exit_code)


def _report(console: Console, outcome: Outcome) -> int:
    """Says on stderr how the job ended; the exit code for it."""
    if console.log_format == "json":
        LOGGER.info("summary", extra={"fields": outcome.as_dict()})
    elif not console.quiet:
        click.echo(summary_text(outcome), err=True)
    try:
        outcome.check_budget()
    except DataError as error:
        return complain(error)
    if console.quiet and outcome.num_failed:
        LOGGER.warning("%s; see the error column of %s", outcome.failures, outcome.output)
    return 0


@contextmanager
def talking(console: Console) -> Iterator[Observe]:
    """Log lines and progress on stderr as the console wants them."""
    level = logging.WARNING if console.quiet else logging.DEBUG if console.verbose else logging.INFO
    mode = "none" if console.quiet else console.progress
    with logging_to(sys.stderr, console.log_format, level):
        observer = make_observer(mode, sys.stderr, LOGGER, time.monotonic)
        try:
            yield observer
        finally:
            observer.close()
