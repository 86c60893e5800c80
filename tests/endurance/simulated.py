"""What `batchrun plan --simulate` foretells of one worker and of two, held against jobs that really run.

    OMP_NUM_THREADS=1 batchrun tune && OMP_NUM_THREADS=2 batchrun tune
    python -m tests.endurance.simulated FILE... --prompt-col input_ids --max-tokens 16

One worker has two threads; two are processes with one thread each that run at the
same time, each with the rows that the policy gives it first. A job's time is that of its engine and all of it, from its
plan to its result, held against the simulated time without and with loading. Every output is as long as it may be. The
machine should do nothing else. Exit status 1: a time is further off than `--within`.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchrun.leases import Leases
from batchrun.plan.plan import load_plan, read_unit
from batchrun.store.layout import Layout


@dataclass(frozen=True)
class Held:
    """Seconds foretold and measured."""

    what: str
    foretold: float
    measured: float

    @property
    def off(self) -> float:
        return self.foretold / self.measured - 1


class Machine:
    """Runs commands with a number of threads."""

    def __init__(self, options: list[str]) -> None:
        self._options = options

    def start(self, verb: str, source: Path, out: Path, threads: int, *more: str) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "batchrun", verb, str(source), "-o", str(out), "--json", "-q", "--overwrite"]
        env = os.environ | {"OMP_NUM_THREADS": str(threads)}
        return subprocess.Popen([*command, *self._options, *more], stdout=subprocess.PIPE, env=env)

    def run(self, verb: str, source: Path, out: Path, threads: int, *more: str) -> dict[str, Any]:
        return result(self.start(verb, source, out, threads, *more))


def result(process: "subprocess.Popen[bytes]") -> dict[str, Any]:
    shown = json.loads(process.communicate()[0])
    assert process.returncode == 0
    return shown


def halves(source: Path, out: Path, folder: Path) -> list[Path]:
    """The rows of a planned job in two files, as the policy gives them to two workers, each in plan order."""
    plan = load_plan(Layout(out).plan)
    assert plan is not None
    table = pa.concat_tables([read_unit(unit) for unit in plan.units])
    keep_len = table.column("keep_len").to_numpy()
    shared_len = np.concatenate([[0], keep_len[:-1]]).astype(np.int32)
    lengths = pa.compute.list_value_length(table.column("token_ids")).to_numpy().astype(np.int64)
    leases, files = Leases(shared_len, lengths - shared_len + 1, 2), []
    for worker in range(2):
        leases.join(worker)
        leases.take(worker, 1)
    for worker, places in leases.stretches().items():
        rows = table.column("row_idx").to_numpy()[np.concatenate([leases.held(worker), places])]
        files.append(folder / f"half-{worker}.parquet")
        pq.write_table(pq.read_table(source).take(rows), files[-1])
    return files


def held(machine: Machine, source: Path, folder: Path) -> Iterator[Held]:
    """One worker with two threads, then two with one."""
    out = folder / "out"
    one = machine.run("plan", source, out, 2, "--simulate", "1")["fleet"]
    ran = machine.run("submit", source, out, 2)
    yield from compared(f"{source.stem}, 1 worker", one, [ran])
    two = machine.run("plan", source, out, 1, "--simulate", "2")["fleet"]
    files = halves(source, out, folder)
    processes = [machine.start("submit", file, folder / file.stem, 1) for file in files]
    yield from compared(f"{source.stem}, 2 workers", two, [result(process) for process in processes])


def compared(what: str, fleet: dict[str, Any], outcomes: list[dict[str, Any]]) -> Iterator[Held]:
    time_s = fleet["crews"][0]["time_s"]
    yield Held(what + ", engine", time_s - fleet["load_s"], max(one["run_s"] for one in outcomes))
    yield Held(what + ", all", time_s, max(one["elapsed_s"] for one in outcomes))


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--model", "-m", default=None)
@click.option("--prompt-col", default="input_ids", show_default=True)
@click.option("--max-tokens", default=16, show_default=True)
@click.option("--rounds", default=1, show_default=True)
@click.option("--within", default=0.2, show_default=True)
def main(
    files: tuple[Path, ...], model: str | None, prompt_col: str, max_tokens: int, rounds: int, within: float
) -> None:
    """Print what was foretold, what was measured, and how far apart they are."""
    options = ["--prompt-col", prompt_col, "--max-tokens", str(max_tokens), "--ignore-eos"]
    machine, worst = Machine(options + (["-m", model] if model else [])), 0.0
    click.echo(f"{'':32} {'foretold':>9} {'measured':>9} {'off':>7}")
    for source in files * rounds:
        with tempfile.TemporaryDirectory() as scratch:
            for each in held(machine, source, Path(scratch)):
                click.echo(f"{each.what:32} {each.foretold:8.2f}s {each.measured:8.2f}s {each.off:+7.1%}")
                worst = max(worst, abs(each.off))
    sys.exit(0 if worst <= within else 1)


if __name__ == "__main__":
    main()
