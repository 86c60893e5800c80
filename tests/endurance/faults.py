"""Spoils every call by which a small job touches its disk, one after the other, and runs the same command again.

    python -m tests.endurance.faults [--rows 2] [--jobs 4] [--scenario fresh] [--every-write] [--full]

A call is refused, finds the disk full (and so does all that follows), is cut in half, is the last one before a kill or
a power cut, which takes whatever was not synced, or waits for its process to be woken after another has taken its
place. Of writes to a file one after the other these are the first and the last, unless all are asked for. What must
come of it: a named error in one line, or no harm at all; and from the same command again, with no help, the result of
an undisturbed run, byte for byte. Exit status 1: something else came of one. Needs Linux and a C compiler.
"""

import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import get_args

import click

from batchrun import worker
from batchrun.store import layout, lease
from tests.endurance import shim
from tests.endurance.forked import Ended
from tests.endurance.scenarios import Scenario, Scenarios
from tests.endurance.shim import Call, Fault
from tests.endurance.spoiled import Spoiler, files

_LEASE_S = 0.3
# What a disk that fails may end a job with; 1 would be a bug.
_NAMED = {65: "unreadable", 66: "no such input", 73: "cannot create", 74: "disk failed", 75: "stopped"}


@dataclass(frozen=True, slots=True)
class Point:
    """One spoiled call and what came of it; `wrong` is empty when all is well."""

    scenario: str
    call: str
    file: str
    fault: Fault
    ended: Ended
    wrong: str

    @property
    def outcome(self) -> str:
        if self.ended.is_killed:
            return "killed"
        return _NAMED.get(self.ended.exit_code, "?") if self.ended.exit_code else "no harm"


@dataclass(frozen=True, slots=True)
class Choice:
    """Which calls are spoiled, and how."""

    faults: Sequence[Fault]
    every_write: bool
    one_fault: bool

    def points(self, calls: list[Call], *, is_reading: bool) -> Iterator[tuple[int, Fault]]:
        """The numbers of the calls with a fault each."""
        turn = count()
        for number, call in enumerate(calls, 1):
            is_between = {_write(call)} == {_write(near) for near in calls[number - 2 : number + 1]} != {None}
            if is_between and not self.every_write:
                continue
            faults = [fault for fault in call.faults[: 1 if is_reading else None] if fault in self.faults]
            if self.one_fault and faults:
                faults = [faults[next(turn) % len(faults)]]
            yield from ((number, fault) for fault in faults)


def spoil(scratch: Path, library: Path, scenario: Scenario, chosen: tuple[int, Fault]) -> Point:
    """One point, in a folder of this process's own below `scratch`."""
    number, fault = chosen
    own = scratch / f"process-{os.getpid()}"
    own.mkdir(exist_ok=True)
    spoiler, case = Spoiler(own, library), own / "case"
    command = scenario.command(case)
    ended, calls = spoiler.spoil(scenario.before, command, case, number, fault)
    spoiled = next((call for call in calls if call.is_spoiled), calls[-1])
    if fault == "power cut":
        shim.cut_power(calls, case)
    wrong = _wrong_end(ended, is_reached=any(call.is_spoiled for call in calls))
    wrong = wrong or _wrong_result(scenario, case, spoiler.again(command))
    name = (spoiled.other if spoiled.other.name else spoiled.path).relative_to(case)
    shutil.rmtree(case)
    return Point(scenario.name, spoiled.name, _general(name), fault, ended, wrong)


def _write(call: Call) -> Path | None:
    return call.path if call.name == "write" else None


def _wrong_end(ended: Ended, *, is_reached: bool) -> str:
    if not is_reached:
        return "the call was not reached: the job is not the same every time"
    if "Traceback" in ended.said:
        return f"a traceback: {ended.said.splitlines()[-1]}"
    if ended.is_killed or ended.exit_code == 0:
        return ""
    last = ended.said.splitlines()[-1] if ended.said else ""
    if ended.exit_code not in _NAMED or not last.startswith("error: "):
        return f"exit {ended.exit_code}: {last}"
    return ""


def _wrong_result(scenario: Scenario, case: Path, again: Ended) -> str:
    if again.exit_code:
        return f"again: exit {again.exit_code}: {again.said.splitlines()[-1] if again.said else ''}"
    if scenario.expected and files(case / "out") != scenario.expected:
        return "again: another result"
    leftover = [] if scenario.is_reading else list((case / "out.batchrun" / "tmp").iterdir())
    return f"again: {leftover[0].name} is left behind" if leftover else ""


def _general(path: Path) -> str:
    """The file's name without what differs from one call to the next."""
    return "".join("#" if char.isdigit() else char for char in path.as_posix().split("/tmp/")[-1].split("-", 1)[-1])


def table(points: list[Point], title: str, key: Callable[[Point], str]) -> str:
    """How many points of each kind came to what."""
    outcomes = ["no harm", "killed", *_NAMED.values(), "?"]
    kinds = Counter(map(key, points))
    found = Counter((key(point), point.outcome) for point in points)
    wrong = Counter(key(point) for point in points if point.wrong)
    seen = [outcome for outcome in outcomes if any(found[kind, outcome] for kind in kinds)]
    width = max(len(title), *map(len, kinds))
    lines = [f"{title:{width}}  points  " + "  ".join([*seen, "wrong"])]
    for kind, number in kinds.items():
        cells = [f"{found[kind, outcome]:{len(outcome)},}" for outcome in seen]
        lines.append(f"{kind:{width}}  {number:6,}  " + "  ".join([*cells, f"{wrong[kind]:5,}"]))
    return "\n".join(lines)


@click.command()
@click.option("--rows", default=2, show_default=True)
@click.option("--jobs", default=2 * (os.cpu_count() or 1), show_default=True, help="Points at a time.")
@click.option("--scenario", "only", multiple=True, help="Only these; by default all.")
@click.option("--every-write", is_flag=True, help="Also the writes between the first and the last to a file.")
@click.option(
    "--fault", "faults", multiple=True, type=click.Choice(get_args(Fault)), help="Only these; by default all."
)
@click.option("--one-fault", is_flag=True, help="Only one fault for each call, by turns.")
@click.option("--full", is_flag=True, help="A line for every point.")
def main(
    rows: int,
    jobs: int,
    only: tuple[str, ...],
    every_write: bool,
    faults: tuple[Fault, ...],
    one_fault: bool,
    full: bool,
) -> None:
    """Print what came of every fault, and fail where it is not what must come of it."""
    library = Path(os.environ.get("LD_PRELOAD", ""))
    if library.name != "fault_shim.so":
        with tempfile.TemporaryDirectory() as built:
            preload = {"LD_PRELOAD": str(shim.build(Path(built)))}
            command = [sys.executable, "-m", "tests.endurance.faults", *sys.argv[1:]]
            sys.exit(subprocess.run(command, env=os.environ | preload, check=False).returncode)
    # A paused process is taken for gone sooner than it would be; and no call depends on how fast a job happens to be.
    layout.LEASE_S = lease.LEASE_S = _LEASE_S
    worker._PROGRESS_EVERY_S = float("inf")
    choice = Choice(faults or get_args(Fault), every_write=every_write, one_fault=one_fault)
    began, points = time.perf_counter(), []
    with tempfile.TemporaryDirectory(dir=_fast_folder()) as folder:
        scratch = Path(folder)
        spoiler = Spoiler(scratch, library)
        scenarios = [each for each in Scenarios(scratch, spoiler, rows).make() if not only or each.name in only]
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
            for scenario in scenarios:
                calls = spoiler.record(scenario.before, scenario.command(scratch / "case"), scratch / "case")
                shutil.rmtree(scratch / "case")
                chosen = list(choice.points(calls, is_reading=scenario.is_reading))
                click.echo(f"{scenario.name}: {len(calls):,} calls, {len(chosen):,} points", err=True)
                for point in pool.map(partial(spoil, scratch, library, scenario), chosen):
                    points.append(point)
                    if point.wrong or full:
                        _say(point)
    num_wrong = sum(bool(point.wrong) for point in points)
    if points:
        click.echo(table(points, "command, fault", lambda point: f"{point.scenario}, {point.fault}") + "\n")
        click.echo(table(points, "call", lambda point: point.call) + "\n")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    click.echo(
        f"{len(points):,} points in {time.perf_counter() - began:.0f} s, {used.ru_utime + used.ru_stime:.0f} s of "
        f"processor time; {num_wrong:,} wrong"
    )
    sys.exit(1 if num_wrong or not points else 0)


def _say(point: Point) -> None:
    click.echo(
        f"{point.scenario}: {point.call} {point.file} {point.fault}: exit {point.ended.exit_code} "
        f"{point.wrong or 'and complete again'}"
    )


def _fast_folder() -> str | None:
    """In memory where that is possible: what the disk would keep is told from the log."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


if __name__ == "__main__":
    main()
