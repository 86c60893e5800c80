"""The command that looks around: list. The standard library and click only, as `status`."""

import json
import time
from pathlib import Path

import click

from batchrun.cli_text import failed, joined
from batchrun.errors import InputMissing
from batchrun.filesystem import is_url
from batchrun.observe.duration import duration
from batchrun.observe.printable import one_line
from batchrun.store.listing import Listed, list_jobs


@click.command()
@click.argument("folder", metavar="[DIR]", default=".")
@click.option("--json", "is_json", is_flag=True, envvar="BATCHRUN_JSON", help="One JSON object on stdout.")
def list(folder: str, is_json: bool) -> None:
    """All jobs below DIR, the latest first.

    Says how far each is, what failed and when it was last heard of. DIR is the current folder unless given.

    \b
    Example:
      batchrun list out
    """
    jobs = _jobs(folder)
    if is_json:
        click.echo(json.dumps({"jobs": [job.to_dict() for job in jobs]}))
    else:
        click.echo(list_text(jobs, time.time()))


def _jobs(folder: str) -> tuple[Listed, ...]:
    if is_url(folder):
        # Its client is an extra.
        from batchrun.store.object_listing import list_urls

        return list_urls(folder)
    if not Path(folder).is_dir():
        raise InputMissing(f"no folder {folder}; give one that jobs write to")
    return list_jobs(Path(folder))


def list_text(jobs: tuple[Listed, ...], at_s: float) -> str:
    """A line for each job; `at_s` is now, seconds since the epoch."""
    if not jobs:
        return "no jobs"
    lines = [("status", "rows", "when", "output"), *(_line(job, at_s) for job in jobs)]
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    return "\n".join("  ".join((*map(str.ljust, line[:3], widths), line[3])) for line in lines)


def _line(job: Listed, at_s: float) -> tuple[str, str, str, str]:
    output, when = one_line(job.output), f"{duration(at_s - job.at)} ago"
    if job.status is None:
        return "unreadable", one_line(job.problem), when, output
    counts = job.status.request_counts
    done = counts.completed + counts.failed
    of = "" if counts.total is None else f" of {counts.total:,}"
    rows = joined(f"{done:,}{of}", failed(job.status.errors))
    return job.status.status.replace("_", " "), rows, when, output
