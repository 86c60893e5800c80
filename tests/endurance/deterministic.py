"""Answers the same rows in other orders, batches and pools, with kills, and counts the rows whose text changes.

    python -m tests.endurance.deterministic [--rows 20] [--max-tokens 16] [FILE...]

on the example's reviews, or files with a column `prompt`. All combinations are run with `--deterministic` and without
it (and with `--torch` without the C kernels, where torch computes). Then the job is timed with and without the option,
by turns, and half of its rows are computed again by `verify --rerun`. Exit status 1: a byte differs with
`--deterministic`, or fewer jobs were killed than should be.
"""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchrun.store.layout import Layout
from batchrun_kernels import native
from tests.endurance import forked

_EXAMPLES = Path(__file__).parents[2] / "examples"
# Long enough for rows to be read together where they share it, short enough to be computed often.
_TEMPLATE = """Each review of a product, a restaurant or an app is followed by the customer's sentiment.

Review: Boils in two minutes and looks good on the counter. Would buy again.
Sentiment: positive
Review: Stopped working after two days, and nobody answers the phone.
Sentiment: negative
Review: {{ review }}
Sentiment:"""
_CHUNKS = (512, 64, 17, 2048, 100, 256, 33, 1024, 128, 512)
_ROWS = (128, 8, 3, 64, 5, 16, 2, 32, 12, 1)
_KILLS = (0, 0, 2, 0, 1, 3, 0, 1, 2, 0)
_ROUNDS = 3  # of the timing
Texts = dict[int, tuple[str, str, int]]  # text, finish_reason and completion_tokens by id


def without_kernels() -> None:
    """This process is as on a machine without a C compiler."""
    native.FOLDER = Path("/nonexistent")


@dataclass(frozen=True, slots=True)
class Way:
    """How all combinations are run: an option, or something that is done to the process before."""

    name: str
    options: tuple[str, ...] = ()
    prepare: Callable[[], None] = lambda: None


_WAYS = (Way("--deterministic", ("--deterministic",)), Way("without it"), Way("in plain torch", (), without_kernels))


@dataclass(frozen=True, slots=True)
class Combination:
    """An order of the rows, and how they are run in it."""

    number: int
    order: tuple[int, ...]
    num_kills: int

    @property
    def options(self) -> tuple[str, ...]:
        """Every third in a pool that is too small, every other without shared prefixes."""
        at = self.number
        options = ["--max-num-batched-tokens", str(_CHUNKS[at]), "--max-num-seqs", str(_ROWS[at])]
        options += ["--prefix-caching", "off" if at % 2 else "on"]
        if at % 3 == 2:
            options += ["--kv-cache-memory", "40MiB", "--preemption", "swap" if at % 2 else "recompute"]
        return tuple(options)


def combinations(num_rows: int, seed: int) -> list[Combination]:
    """The first has the rows as they come."""
    rng = random.Random(seed)
    orders = [list(range(num_rows)), *(rng.sample(range(num_rows), num_rows) for _ in _CHUNKS[1:])]
    return [Combination(number, tuple(order), _KILLS[number]) for number, order in enumerate(orders)]


@dataclass(frozen=True, slots=True)
class Work:
    """The rows, and the options of every job on them."""

    rows: pa.Table  # with a column `id`
    options: tuple[str, ...]

    def command(self, folder: Path, order: tuple[int, ...], options: tuple[str, ...]) -> list[str]:
        """Of a job on the rows in this order, which ends in `folder` / "out"."""
        source = folder / "rows.parquet"
        pq.write_table(self.rows.take(list(order)), source)
        return ["submit", str(source), "-o", str(folder / "out"), "-q", "--keep-cols", "id", *self.options, *options]


def kill_once_it_has_saved(command: list[str], at: Layout, rng: random.Random, way: Way) -> bool:
    """Whether there was something to kill: a process that had saved something of what it has to do."""

    def saved() -> set[str | float]:
        partial = {at.partial.stat().st_mtime} if at.partial.exists() else set[float]()
        return {path.name for path in at.parts.glob("*")} | partial

    before, child = saved(), forked.start(command, at.out.with_name("said"), way.prepare)
    while forked.is_running(child):
        if saved() != before:
            time.sleep(rng.uniform(0, 0.2))
            os.kill(child, signal.SIGKILL)
            break
        time.sleep(0.02)
    return forked.wait(child, at.out.with_name("said")).is_killed


def run(work: Work, one: Combination, folder: Path, way: Way) -> tuple[Texts, int]:
    """The answers by id, and how often the job was killed before it had them."""
    options, rng = ("--checkpoint-every", "0.2s", *one.options, *way.options), random.Random(one.number)
    command, out = work.command(folder, one.order, options), folder / "out"
    num_kills = sum(kill_once_it_has_saved(command, Layout(out), rng, way) for _ in range(one.num_kills))
    ended = forked.run(command, folder / "said", way.prepare)
    assert ended.exit_code == 0, ended
    table = pq.read_table(out, columns=["id", "text", "finish_reason", "completion_tokens"]).to_pylist()
    return {row["id"]: (row["text"], row["finish_reason"], row["completion_tokens"]) for row in table}, num_kills


def differing(first: Texts, other: Texts) -> tuple[set[int], int]:
    """The rows whose answer is another, and in how many bytes of their text."""
    assert first.keys() == other.keys(), "rows were lost"
    rows = {name for name, answer in first.items() if answer != other[name]}
    num_bytes = 0
    for name in rows:
        one, two = (np.frombuffer(texts[name][0].encode(), np.uint8) for texts in (first, other))
        shorter = min(len(one), len(two))
        num_bytes += int((one[:shorter] != two[:shorter]).sum()) + abs(len(one) - len(two))
    return rows, num_bytes


def compare(way: Way, work: Work, chosen: list[Combination]) -> tuple[int, int]:
    """Prints a line for each combination and one for all; the rows that differ, and kills that came too late."""
    first: Texts = {}
    flipped: set[int] = set()
    all_bytes = all_rows = num_missed = 0
    for one in chosen:
        with tempfile.TemporaryDirectory() as scratch:
            texts, num_kills = run(work, one, Path(scratch), way)
        first = first or texts
        others, num_bytes = differing(first, texts)
        flipped |= others
        all_rows, all_bytes = all_rows + len(others), all_bytes + num_bytes
        num_missed += one.num_kills - num_kills
        click.echo(
            f"{way.name:16} {one.number:2} {num_kills} kills  {len(others):3} rows differ  {' '.join(one.options)}"
        )
    runs = len(chosen) - 1
    click.echo(
        f"{way.name}: {all_bytes:,} bytes differ; {len(flipped)} of {work.rows.num_rows} rows have more than one text "
        f"in {len(chosen)} combinations; flip rate {all_rows / (runs * work.rows.num_rows):.2%} of the answers\n"
    )
    return all_rows, num_missed


def batchrun(arguments: list[str]) -> tuple[dict[str, Any], float]:
    """What the command says in JSON, and its seconds from start to end, imports and loading included."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "batchrun", *arguments, "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout), time.perf_counter() - began


def price(work: Work, rounds: int) -> None:
    """Prints what the option costs, and what a rerun of a job without it finds."""
    engine: dict[tuple[str, ...], list[float]] = {(): [], ("--deterministic",): []}
    whole: dict[tuple[str, ...], list[float]] = {options: [] for options in engine}
    in_order = tuple(range(work.rows.num_rows))
    for number in range(rounds):
        for options in engine:
            with tempfile.TemporaryDirectory() as scratch:
                said, seconds = batchrun(work.command(Path(scratch), in_order, options))
                engine[options].append(said["run_s"])
                whole[options].append(seconds)
                if not options and number == rounds - 1:
                    rerun, _ = batchrun(["verify", str(Path(scratch, "out")), "--rerun", "50%"])
    for name, lasted in (("in the engine", engine), ("from start to end", whole)):
        without, own = (median(each) for each in lasted.values())
        click.echo(
            f"{name}: {without:.2f} s without, {own:.2f} s with --deterministic, {own / without:.3f}x "
            f"(medians of {rounds}, by turns)"
        )
    again = rerun["rerun"]
    click.echo(f"verify --rerun 50% without it: {again['rows']} rows, flip rate {1 - again['match_rate']:.2%}")


@click.command()
@click.argument("files", nargs=-1, type=click.Path(exists=True, path_type=Path))
@click.option("--rows", "num_rows", default=20, show_default=True, help="Of each file, evenly from all over it.")
@click.option("--max-tokens", default=16, show_default=True)
@click.option("--model", "-m")
@click.option("--torch", "in_torch", is_flag=True, help="Also without the C kernels.")
@click.option("--rounds", default=_ROUNDS, show_default=True, help="Of the timing.")
@click.option("--seed", default=1, show_default=True)
def main(
    files: tuple[Path, ...], num_rows: int, max_tokens: int, model: str | None, in_torch: bool, rounds: int, seed: int
) -> None:
    """Print what differs in each way, and what the option costs."""
    began = time.perf_counter()
    forked.import_engine()
    column, prompt = ("prompt", ("--prompt-col", "prompt")) if files else ("review", ("-t", _TEMPLATE))
    tables = [pq.read_table(file, columns=[column]) for file in files or (_EXAMPLES / "reviews.parquet",)]
    rows = pa.concat_tables([table.take(np.linspace(0, table.num_rows - 1, num_rows).astype(int)) for table in tables])
    rows = rows.append_column("id", pa.array(range(rows.num_rows)))
    options = ("--chat", "off", "--ignore-eos", "--max-tokens", str(max_tokens), *prompt)
    work = Work(rows, (*options, *(("-m", model) if model else ())))
    chosen = combinations(rows.num_rows, seed)
    found = [compare(way, work, chosen) for way in _WAYS[: 3 if in_torch else 2]]
    price(work, rounds)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    click.echo(f"{time.perf_counter() - began:.0f} s in all, {used.ru_utime + used.ru_stime:.0f} s of processor time")
    num_rows, num_missed = found[0]
    sys.exit(1 if num_rows or num_missed else 0)


if __name__ == "__main__":
    main()
