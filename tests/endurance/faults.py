"""Spoils every call by which a small job touches its disk, one after the other, and runs the same command again.

    python -m tests.endurance.faults [--rows 3] [--scenario fresh] [--every-write] [--full]

A call is refused, finds the disk full (and so does all that follows), is cut in half, is the last one before a kill or
a power cut, which takes whatever was not synced, or waits for its process to be woken after another has taken its
place. Of writes to a file one after the other these are the first and the last, unless all are asked for. What must
come of it: a named error in one line, or no harm at all; and from the same command again, with no help, the result of
an undisturbed run, byte for byte. Exit status 1: something else came of one. Needs Linux and a C compiler.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import get_args

import click
import pyarrow as pa
import pyarrow.parquet as pq

from batchrun.store import layout, lease
from tests.endurance import forked, shim
from tests.endurance.forked import Ended
from tests.endurance.shim import Call, Fault

_LEASE_S = 0.3
# What a disk that fails may end a job with; 1 would be a bug.
_NAMED = {65: "unreadable", 66: "no such input", 73: "cannot create", 74: "disk failed", 75: "stopped"}


@dataclass(frozen=True, slots=True)
class Scenario:
    """A command to spoil: run as `arguments` on a copy of the folder `before`."""

    name: str
    before: Path
    arguments: tuple[str, ...]
    expected: dict[str, bytes]  # the files of OUT in the end
    is_reading: bool = False

    def command(self, folder: Path) -> list[str]:
        return [argument.replace("OUT", str(folder / "out")) for argument in self.arguments]


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
        return _NAMED.get(self.ended.exit_code, "no harm" if not self.ended.exit_code else "?")


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


class Walk:
    """Spoils scenarios call by call in the folder `scratch`."""

    def __init__(self, scratch: Path, library: Path, choice: Choice) -> None:
        self._scratch = scratch
        self._library = library
        self._choice = choice

    def prepare(self, rows: int) -> list[Scenario]:
        """A job from nothing, one that was killed halfway, one over another's result, and commands that only look."""
        source = self._scratch / "rows.parquet"
        prompts = [f"Be brief. What of {number * number % 97}?" for number in range(rows)]
        pq.write_table(pa.table({"prompt": [*prompts, ""], "n": range(rows + 1)}), source)
        options = (
            "-m", "echo", "-o", "OUT", "--max-num-seqs", "3", "--max-tokens", "6", "--checkpoint-every", "0.000001",
            "--max-num-batched-tokens", "64", "--kv-cache-memory", "16KiB", "--swap-space", "0", "--progress", "none",
            "--wait-lock", "10s",
        )  # fmt: skip
        nothing, halfway, other, complete = (self._scratch / name for name in ("nothing", "half", "other", "complete"))
        nothing.mkdir()
        submit = ("submit", str(source), *options)
        fresh = Scenario("fresh", nothing, submit, {})
        calls = self._record(fresh, complete)
        expected = _files(complete / "out")
        fresh = Scenario("fresh", nothing, submit, expected)
        self._spoil(fresh, halfway, _halfway(calls), "killed")
        self._record(Scenario("other", nothing, (*submit, "--max-tokens", "3"), {}), other)
        return [
            fresh,
            Scenario("resumed", halfway, submit, expected),
            Scenario("overwritten", other, (*submit, "--overwrite"), expected),
            Scenario("complete", complete, submit, expected),
            Scenario("verify", complete, ("verify", "OUT"), expected, is_reading=True),
            Scenario("status", halfway, ("status", "OUT"), {}, is_reading=True),
        ]

    def spoil_all(self, scenario: Scenario) -> list[Point]:
        """Every call with every fault that can befall it."""
        case = self._scratch / "case"
        calls = self._record(scenario, case)
        _remove(case)
        found = []
        for number, fault in self._choice.points(calls, is_reading=scenario.is_reading):
            found.append(self._point(scenario, case, number, fault))
            _remove(case)
        return found

    def _point(self, scenario: Scenario, case: Path, number: int, fault: Fault) -> Point:
        ended, calls = self._spoil(scenario, case, number, fault)
        spoiled = next((call for call in calls if call.is_spoiled), calls[-1])
        if fault == "power cut":
            shim.cut_power(calls, case)
        wrong = _wrong_end(ended, is_reached=any(call.is_spoiled for call in calls))
        again = forked.run(scenario.command(case), self._scratch / "again")
        wrong = wrong or _wrong_result(scenario, case, again)
        name = (spoiled.other if spoiled.other.name else spoiled.path).relative_to(case)
        return Point(scenario.name, spoiled.name, _general(name), fault, ended, wrong)

    def _record(self, scenario: Scenario, case: Path) -> list[Call]:
        ended, calls = self._spoil(scenario, case, 0, "refused")
        assert ended.exit_code == 0, ended
        return calls

    def _spoil(self, scenario: Scenario, case: Path, number: int, fault: Fault) -> tuple[Ended, list[Call]]:
        shutil.copytree(scenario.before, case)
        log = self._scratch / "log"
        said = self._scratch / "said"
        child = forked.start(scenario.command(case), said, lambda: shim.arm(self._library, case, log, number, fault))
        if forked.is_paused(child):
            # Whoever comes next waits until the paused one counts as gone, and ends the job in its place.
            forked.run(scenario.command(case), self._scratch / "winner")
            os.kill(child, signal.SIGCONT)
        return forked.wait(child, said), shim.calls(log)


def _write(call: Call) -> Path | None:
    return call.path if call.name == "write" else None


def _halfway(calls: list[Call]) -> int:
    """The number of a call by which some rows are committed and others have saved tokens."""
    commits = [
        number for number, call in enumerate(calls, 1) if call.name == "link" and call.other.parent.name == "parts"
    ]
    return commits[len(commits) // 2]


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
    if scenario.expected and _files(case / "out") != scenario.expected:
        return "again: another result"
    leftover = [] if scenario.is_reading else list((case / "out.batchrun" / "tmp").iterdir())
    return f"again: {leftover[0].name} is left behind" if leftover else ""


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def _remove(case: Path) -> None:
    shutil.rmtree(case)


def _general(path: Path) -> str:
    """The file's name without what differs from one call to the next."""
    return "".join("#" if char.isdigit() else char for char in path.as_posix().split("/tmp/")[-1].split("-", 1)[-1])


def table(points: list[Point]) -> str:
    """How often what came of which fault of which call."""
    outcomes = Counter((point.scenario, point.call, point.fault, point.outcome) for point in points)
    lines = [f"{'scenario':12} {'call':8} {'fault':14} {'outcome':15} points"]
    lines += [f"{scenario:12} {call:8} {fault:14} {outcome:15} {number:6}" for (scenario, call, fault, outcome), number
              in sorted(outcomes.items())]  # fmt: skip
    return "\n".join(lines)


@click.command()
@click.option("--rows", default=3, show_default=True)
@click.option("--scenario", "only", multiple=True, help="Only these; by default all.")
@click.option("--every-write", is_flag=True, help="Also the writes between the first and the last to a file.")
@click.option(
    "--fault", "faults", multiple=True, type=click.Choice(get_args(Fault)), help="Only these; by default all."
)
@click.option("--one-fault", is_flag=True, help="Only one fault for each call, by turns.")
@click.option("--full", is_flag=True, help="A line for every point.")
def main(
    rows: int, only: tuple[str, ...], every_write: bool, faults: tuple[Fault, ...], one_fault: bool, full: bool
) -> None:
    """Print what came of every fault, and fail where it is not what must come of it."""
    library = Path(os.environ.get("LD_PRELOAD", ""))
    if library.name != "fault_shim.so":
        with tempfile.TemporaryDirectory() as built:
            preload = {"LD_PRELOAD": str(shim.build(Path(built)))}
            command = [sys.executable, "-m", "tests.endurance.faults", *sys.argv[1:]]
            sys.exit(subprocess.run(command, env=os.environ | preload, check=False).returncode)
    # A paused process is taken for gone sooner than it would be.
    layout.LEASE_S = lease.LEASE_S = _LEASE_S
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=_fast_folder()) as scratch:
        walk = Walk(
            Path(scratch), library, Choice(faults or get_args(Fault), every_write=every_write, one_fault=one_fault)
        )
        scenarios = [each for each in walk.prepare(rows) if not only or each.name in only]
        points = [point for scenario in scenarios for point in walk.spoil_all(scenario)]
    for point in points:
        if point.wrong or full:
            click.echo(f"{point.scenario}: {point.call} {point.file} {point.fault}: exit {point.ended.exit_code} "
                       f"{point.wrong or 'and complete again'}")  # fmt: skip
    num_wrong = sum(bool(point.wrong) for point in points)
    click.echo(table(points))
    click.echo(f"{len(points):,} points in {time.perf_counter() - began:.0f} s, {num_wrong} wrong")
    sys.exit(1 if num_wrong or not points else 0)


def _fast_folder() -> str | None:
    """In memory where that is possible: what the disk would keep is told from the log."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


if __name__ == "__main__":
    main()
