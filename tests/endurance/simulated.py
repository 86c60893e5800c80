"""What `batchrun plan --simulate` foretells of one worker and of two, held against jobs that really run.

    OMP_NUM_THREADS=1 batchrun tune && OMP_NUM_THREADS=2 batchrun tune
    python -m tests.endurance.simulated FILE... --prompt-col input_ids --max-tokens 16

`batchrun submit --workers N` has two threads: one engine has both, and each of two workers has one. The time in the
engine is held against the simulated time without what starts it, and the time from the command to its end, the plan
being there, against all of it. Every output is as long as it may be. The machine should do nothing else. Exit status 1:
a time is further off than `--within`.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

_NUM_THREADS = 2


@dataclass(frozen=True)
class Held:
    """Seconds foretold and measured."""

    what: str
    foretold: float
    measured: float

    @property
    def off(self) -> float:
        return self.foretold / self.measured - 1


@dataclass(frozen=True)
class Ran:
    """What a command printed, and how long it took in all."""

    shown: dict[str, Any]
    seconds: float


def run(threads: int, *arguments: str) -> Ran:
    env = os.environ | {"OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", "batchrun", *arguments, "--json", "-q"]
    began = time.perf_counter()
    ended = subprocess.run(command, stdout=subprocess.PIPE, env=env, check=True)
    return Ran(json.loads(ended.stdout), time.perf_counter() - began)


def held(source: Path, options: list[str], num_workers: int, out: Path) -> Iterator[Held]:
    job = [str(source), "-o", str(out), *options]
    planned = run(_NUM_THREADS // num_workers, "plan", *job, "--simulate", str(num_workers))
    (foretold,) = planned.shown["fleet"]["crews"]
    ran = run(_NUM_THREADS, "submit", *job, "--workers", str(num_workers))
    what = f"{source.stem}, {num_workers} {'worker' if num_workers == 1 else 'workers'}"
    yield Held(f"{what}, engine", foretold["time_s"] - foretold["start_s"], ran.shown["run_s"])
    yield Held(f"{what}, all", foretold["time_s"], ran.seconds)


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
    options += ["-m", model] if model else []
    worst = 0.0
    click.echo(f"{'':32} {'foretold':>9} {'measured':>9} {'off':>7}")
    for source in files * rounds:
        for num_workers in (1, 2):
            with tempfile.TemporaryDirectory() as scratch:
                for each in held(source, options, num_workers, Path(scratch) / "out"):
                    click.echo(f"{each.what:32} {each.foretold:8.2f}s {each.measured:8.2f}s {each.off:+7.1%}")
                    worst = max(worst, abs(each.off))
    sys.exit(0 if worst <= within else 1)


if __name__ == "__main__":
    main()
