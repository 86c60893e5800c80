"""The commands that look: status, report, verify, doctor. They change nothing of a job.

`status` imports the standard library and click only; what the others need is imported when they run.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from batchrun.cli_text import aligned, compared_lines, failed, joined, latency_lines, size
from batchrun.errors import DataError, ModelUnavailable, UsageError
from batchrun.observe.duration import duration
from batchrun.observe.printable import one_line
from batchrun.report.compared import Compared, compare
from batchrun.store.at_hand import at_hand, named
from batchrun.store.layout import read_json
from batchrun.store.status import Status, StatusWord
from batchrun.store.status import status as look

if TYPE_CHECKING:
    from batchrun.doctor import DoctorReport
    from batchrun.rerun import Rerun
    from batchrun.store.verify import VerifyReport

_WATCH_EVERY_S = 2.0
_DIFFERENCES_SHOWN = 10
_WHAT_NOW: Mapping[StatusWord, str] = {
    "planned": "nothing has run yet; batchrun resume runs it",
    "interrupted": "its process is gone; what was committed is kept, batchrun resume goes on from there",
    "cancelled": "all that was done is saved; batchrun resume goes on from there",
    "failed": "ended with an error; what was committed is kept, batchrun resume goes on from there",
    "output_missing": "it was complete, but its result was moved, deleted or has lost files; "
                      "batchrun resume writes it again from the parts once nothing is there",
}  # fmt: skip
_REFUSED = {UsageError.exit_code, DataError.exit_code, ModelUnavailable.exit_code}
_as_json = click.option("--json", "is_json", is_flag=True, envvar="BATCHRUN_JSON", help="One JSON object on stdout.")


@click.command()
@click.argument("output", metavar="OUT")
@_as_json
@click.option("--watch", "-w", is_flag=True, help="Look again every two seconds until nobody works on it.")
def status(output: str, is_json: bool, watch: bool) -> None:
    """How far the job of OUT is, how fast, what failed, who holds it.

    \b
    Example:
      batchrun status out/reviews
    """
    now, compared = _look(output)
    said = ""
    while watch and now.holder is not None:
        if (line := joined(_rows(now), _speed(now.progress) if "elapsed_s" in now.progress else "")) != said:
            click.echo(f"{now.status.replace('_', ' ')}  {line}", err=True)
        said = line
        time.sleep(_WATCH_EVERY_S)
        now, compared = _look(output)
    as_dict = now.to_dict() | {"compared": [asdict(each) for each in compared]}
    click.echo(json.dumps(as_dict) if is_json else status_text(now, time.time(), compared))


@click.command()
@click.argument("output", metavar="OUT")
@click.option("--rerun", metavar="RATE", help="Compute this share of the rows again and compare, e.g. 0.1%.")
@_as_json
def verify(output: str, rerun: str | None, is_json: bool) -> None:
    """Prove that OUT holds every row once, in order, undamaged.

    Exits 65 when it does not. --rerun loads the model and says how many texts came out the same.

    \b
    Example:
      batchrun verify out/reviews
    """
    from batchrun.store.verify import verify as prove

    out = named(output)
    with at_hand(output) as job:
        job.fetch_result()
        stored = (read_json(job.at.job) or {"job": {"output_prefix": ""}})["job"]
        found = prove(job.at.out, f"{stored['output_prefix']}row_idx", stored.get("n", 1))
        report = replace(found, output=job.called(found.output), problems=tuple(map(job.called, found.problems)))
    again = _rerun(out, rerun) if rerun is not None and report.is_ok else None
    if is_json:
        same = {} if again is None else {"rerun": asdict(again) | {"match_rate": again.match_rate}}
        click.echo(json.dumps(asdict(report) | {"is_ok": report.is_ok} | same))
    else:
        click.echo("\n".join([verify_text(report), *([] if again is None else [rerun_text(again)])]))
    if not report.is_ok:
        raise DataError(f"{out} is not what the job should have written: {_problems(report)}")


@click.command()
@click.argument("output", metavar="OUT")
@_as_json
def report(output: str, is_json: bool) -> None:
    """Write a page about how the job went; print its path.

    It is OUT.batchrun/report.html. With --json, print summary.json instead, which lies beside it. Both are written at
    the end of every run too.

    \b
    Example:
      batchrun report out/reviews
    """
    from batchrun.report.report import write_report

    with at_hand(output) as job:
        job.fetch()
        written = write_report(job.at.out, None if isinstance(job.output, Path) else job.output)
        for path in (written.summary, written.page):
            job.keep(path)
        click.echo(written.summary.read_text() if is_json else job.called(str(written.page)))


@click.command()
@_as_json
def doctor(is_json: bool) -> None:
    """What this machine offers: devices, memory, kernels, versions.

    Exits 69 when something is missing.

    \b
    Example:
      batchrun doctor
    """
    from batchrun.doctor import examine

    report = examine()
    click.echo(json.dumps(asdict(report), default=str) if is_json else doctor_text(report))
    if report.problems:
        raise ModelUnavailable(report.problems[0])


def _look(output: str) -> tuple[Status, tuple[Compared, ...]]:
    with at_hand(output) as job:
        now = look(job.at.out)
        return replace(now, output=job.called(now.output)), compare(job.at)


def status_text(now: Status, at_s: float, compared: Sequence[Compared] = ()) -> str:
    """One look at a job; `at_s` is the time of the look, seconds since the epoch."""
    what_now = _WHAT_NOW.get(now.status, "")
    if _is_refused(now):
        what_now = "ended with an error; what was committed is kept"
    lines = [("status", joined(now.status.replace("_", " "), what_now)), *_failure(now), ("rows", _rows(now))]
    if now.holder is not None:
        lines.append(("held by", one_line(f"process {now.holder.pid} on {now.holder.host}")))
    if now.progress_at is not None and "elapsed_s" in now.progress:
        lines.append(("speed", f"{_speed(now.progress)} ({duration(at_s - now.progress_at)} ago)"))
    lines += latency_lines(now.progress.get("latencies", {}))
    lines += compared_lines(compared)
    return aligned([*lines, ("output", one_line(now.output))])


def verify_text(report: "VerifyReport") -> str:
    """What the proof found, problem by problem."""
    planned = "" if report.num_planned is None else f"of {report.num_planned:,} planned"
    rows = " ".join(part for part in (f"{report.num_rows:,}", planned) if part)
    lines = [
        ("rows", joined(rows, f"{report.num_failed:,} failed" if report.num_failed else "")),
        ("files", f"{report.num_files:,}"),
        ("verdict", "complete" if report.is_ok else _problems(report)),
    ]
    return aligned([*lines, *(("", one_line(problem)) for problem in report.problems)])


def rerun_text(again: "Rerun") -> str:
    """How many rows came out the same, and the first of those that did not."""
    same = again.rows - len(again.differences)
    lines = [("again", f"{same:,} of {again.rows:,} rows have the same text ({again.match_rate:.2%})")]
    lines += [
        ("", f"row {each.row_idx}{each.sample}: differs from its token {each.token:,} on")
        for each in again.differences[:_DIFFERENCES_SHOWN]
    ]
    if len(again.differences) > _DIFFERENCES_SHOWN:
        lines.append(("", f"and {len(again.differences) - _DIFFERENCES_SHOWN:,} more; --json has all of them"))
    return aligned(lines)


def _rerun(out: Path | str, share: str) -> "Rerun":
    from batchrun.rerun import rerun, share_of
    from batchrun.stop import StopRequest

    return rerun(out.absolute() if isinstance(out, Path) else out, share_of(share), lambda event: None, StopRequest())


def _problems(report: "VerifyReport") -> str:
    num_problems = len(report.problems)
    return "1 problem" if num_problems == 1 else f"{num_problems:,} problems"


def doctor_text(report: "DoctorReport") -> str:
    """The machine as an aligned block."""
    versions = joined(*(f"{name} {found or 'missing'}" for name, found in report.versions.items()))
    devices = [
        (
            device.name,
            joined(
                device.description,
                f"{size(device.free_bytes)} of {size(device.memory_bytes)} free",
                f"attention {device.attention} ({', '.join(device.features)})" if device.attention else "no attention",
            ),
        )
        for device in report.devices
    ]
    folders = [
        (
            "writable" if folder.is_writable else "read-only",
            f"{folder.path} ({folder.purpose}) · {size(folder.free_bytes)} free",
        )
        for folder in report.folders
    ]
    problems = [("problem", problem) for problem in report.problems] or [("verdict", "ready")]
    return aligned([("python", report.python), ("packages", versions), *devices, *folders, *problems])


def _rows(now: Status) -> str:
    counts = now.request_counts
    done = counts.completed + counts.failed
    of = "" if counts.total is None else f" of {counts.total:,}"
    share = f" ({done / counts.total:.1%})" if counts.total else ""
    return joined(f"{done:,}{of}{share}", failed(now.errors))


def _failure(now: Status) -> list[tuple[str, str]]:
    """What a failed job failed with, and what to do where it is not to be resumed."""
    if now.status != "failed" or "error" not in now.progress:
        return []
    remedy = "batchrun resume would fail so again; when that is mended, or with other options, submit goes on"
    return [("error", one_line(now.progress["error"]["message"])), *([("", remedy)] if _is_refused(now) else [])]


def _is_refused(now: Status) -> bool:
    """Whether it failed for its options, model or data, which are the same under `resume`."""
    return now.status == "failed" and now.progress.get("error", {}).get("exit_code") in _REFUSED


def _speed(progress: Mapping[str, Any]) -> str:
    """What the process said of itself last; the keys are those of `RunProgress`."""
    rate = progress["output_tokens"] / progress["elapsed_s"] if progress["elapsed_s"] else 0.0
    return joined(
        f"{rate:,.0f} tok/s",
        f"prefix hit {progress['hit_rate']:.0%}",
        f"KV {progress['kv_usage']:.0%}",
        f"{progress['num_running']:,} running",
        f"preempted {progress['preemptions']:,}",
    )
