"""Answers the same rows in other orders, batches and pools, with kills, and counts the rows whose text changes.

    python -m tests.endurance.deterministic FILE... --rows 24

for files with a column `prompt`. Each combination is run with `--deterministic`, without it, and without the C kernels,
where torch computes; then the job is timed with and without the option, by turns. Exit status 1: a byte differs with
`--deterministic`.
"""

import json
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchrun.store.layout import Layout

_CHUNKS = (512, 64, 17, 2048, 100, 256, 33, 1024, 128, 512)
_ROWS = (128, 8, 3, 64, 5, 16, 2, 32, 12, 1)
_KILLS = (0, 0, 2, 0, 1, 3, 0, 1, 2, 0)
_WAYS = {
    "--deterministic": ("batchrun", ("--deterministic",)),
    "without it": ("batchrun", ()),
    "in plain torch": ("tests.endurance.plain_torch", ()),
}
Texts = dict[int, tuple[str, str, int]]  # text, finish_reason and completion_tokens by id


@dataclass(frozen=True)
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
            options += ["--kv-cache-memory", "100MiB", "--preemption", "swap" if at % 2 else "recompute"]
        return tuple(options)


def combinations(num_rows: int, seed: int) -> list[Combination]:
    """The first has the rows as they come."""
    rng = random.Random(seed)
    orders = [list(range(num_rows)), *(rng.sample(range(num_rows), num_rows) for _ in _CHUNKS[1:])]
    return [Combination(number, tuple(order), _KILLS[number]) for number, order in enumerate(orders)]


def command(module: str, source: Path, out: Path, options: tuple[str, ...]) -> list[str]:
    return [
        sys.executable, "-m", module, "submit", str(source), "-o", str(out), "--json", "-q", "--prompt-col", "prompt",
        "--keep-cols", "id", "--checkpoint-every", "1s", *options,
    ]  # fmt: skip


def kill_once_it_has_saved(arguments: list[str], at: Layout, rng: random.Random) -> bool:
    """Whether there was something to kill: a process that had saved something of what it has to do."""
    before = {path.name for path in at.parts.glob("*")} | {at.partial.stat().st_mtime if at.partial.exists() else 0}
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        now = {path.name for path in at.parts.glob("*")} | {at.partial.stat().st_mtime if at.partial.exists() else 0}
        if now != before:
            time.sleep(rng.uniform(0, 1))
            process.kill()
            break
        time.sleep(0.02)
    return process.wait() < 0


def run(module: str, rows: pa.Table, one: Combination, folder: Path, options: tuple[str, ...]) -> tuple[Texts, int]:
    """The answers by id, and how often the job was killed before it had them."""
    source, out = folder / "rows.parquet", folder / "out"
    pq.write_table(rows.take(list(one.order)), source)
    arguments, rng = command(module, source, out, (*options, *one.options)), random.Random(one.number)
    num_kills = sum(kill_once_it_has_saved(arguments, Layout(out), rng) for _ in range(one.num_kills))
    subprocess.run(arguments, check=True, stdout=subprocess.DEVNULL)
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


def compare(way: str, rows: pa.Table, chosen: list[Combination], options: tuple[str, ...]) -> int:
    """Prints a line for each combination and one for all; the bytes that differ."""
    module, own = _WAYS[way]
    first: Texts = {}
    flipped: set[int] = set()
    all_bytes = all_rows = 0
    for one in chosen:
        with tempfile.TemporaryDirectory() as scratch:
            texts, num_kills = run(module, rows, one, Path(scratch), (*options, *own))
        first = first or texts
        others, num_bytes = differing(first, texts)
        flipped |= others
        all_rows, all_bytes = all_rows + len(others), all_bytes + num_bytes
        click.echo(f"{way:16} {one.number:2} {num_kills} kills  {len(others):3} rows differ  {' '.join(one.options)}")
    runs = len(chosen) - 1
    click.echo(
        f"{way}: {all_bytes:,} bytes differ; {len(flipped)} of {rows.num_rows} rows have more than one text in "
        f"{len(chosen)} combinations, {all_rows / (runs * rows.num_rows):.2%} of the answers are another than the first"
    )
    return all_bytes


def seconds(rows: pa.Table, options: tuple[str, ...]) -> float:
    """Of the engine, without loading."""
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, "rows.parquet")
        pq.write_table(rows, source)
        done = subprocess.run(
            command("batchrun", source, Path(scratch, "out"), options), check=True, capture_output=True, text=True
        )
    return float(json.loads(done.stdout)["run_s"])


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--rows", "num_rows", default=24, show_default=True, help="Of each file, evenly from all over it.")
@click.option("--max-tokens", default=48, show_default=True)
@click.option("--model", "-m")
@click.option("--way", "ways", multiple=True, type=click.Choice(list(_WAYS)), help="Default: all.")
@click.option("--rounds", default=2, show_default=True, help="Of the timing.")
@click.option("--seed", default=1, show_default=True)
def main(
    files: tuple[Path, ...],
    num_rows: int,
    max_tokens: int,
    model: str | None,
    ways: tuple[str, ...],
    rounds: int,
    seed: int,
) -> None:
    """Print what differs in each way, and what the option costs."""
    tables = [pq.read_table(file, columns=["prompt"]) for file in files]
    tables = [table.take(np.linspace(0, table.num_rows - 1, num_rows).astype(int)) for table in tables]
    rows = pa.concat_tables(tables)
    rows = rows.append_column("id", pa.array(range(rows.num_rows)))
    options = ("--chat", "off", "--ignore-eos", "--max-tokens", str(max_tokens), *(("-m", model) if model else ()))
    chosen = combinations(rows.num_rows, seed)
    num_bytes = {way: compare(way, rows, chosen, options) for way in ways or _WAYS}
    for number in range(rounds):
        without, own = (seconds(rows, (*options, *more)) for more in ((), ("--deterministic",)))
        click.echo(
            f"round {number + 1}: {without:.2f} s without, {own:.2f} s with --deterministic: {own / without:.3f}x"
        )
    sys.exit(1 if num_bytes.get("--deterministic") else 0)


if __name__ == "__main__":
    main()
