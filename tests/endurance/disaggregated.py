"""One engine against two, workers or prompts and outputs apart: python -m tests.endurance.disaggregated

Rows of random tokens with outputs of a fixed length, so that prompts and outputs are as much work as they say. Prints
for each kind of work what each way took, by turns, and exits 1 where a text differs. Every way has all threads; two
processes divide them.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


@dataclass(frozen=True)
class Work:
    """So many rows of so many tokens each."""

    name: str
    num_rows: int
    prompt_len: int
    output_len: int


WORKS = (
    Work("prompts", num_rows=24, prompt_len=256, output_len=4),
    Work("both", num_rows=24, prompt_len=128, output_len=32),
    Work("outputs", num_rows=24, prompt_len=16, output_len=96),
)
WAYS = {"one engine": (), "two workers": ("--workers", "2"), "disaggregated": ("--disaggregate",)}


@click.command()
@click.option("--rounds", default=2, help="Jobs of each kind.")
@click.option("--work", "names", multiple=True, help="Only this work: prompts, both or outputs (repeatable).")
@click.option("--max-num-seqs", default=8, help="Rows in a step, at most.")
def main(rounds: int, names: tuple[str, ...], max_num_seqs: int) -> None:
    click.echo(f"{os.environ.get('OMP_NUM_THREADS') or len(os.sched_getaffinity(0))} threads")
    differs = False
    for work in WORKS:
        if names and work.name not in names:
            continue
        found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
        answers = set()
        with tempfile.TemporaryDirectory() as folder:
            source = _write(work, Path(folder))
            for turn in range(rounds):
                for way, options in WAYS.items():
                    out = Path(folder) / f"{way.replace(' ', '-')}-{turn}"
                    limits = ("--max-tokens", str(work.output_len), "--max-num-seqs", str(max_num_seqs))
                    found[way].append(_run(source, out, (*limits, *options)))
                    answers.add(str(pq.read_table(out, columns=["text"]).column(0).to_pylist()))
        differs = differs or len(answers) > 1
        _show(work, found, is_equal=len(answers) == 1)
    sys.exit(differs)


def _write(work: Work, folder: Path) -> Path:
    prompts = np.random.default_rng(5).integers(1000, 20_000, (work.num_rows, work.prompt_len))
    source = folder / "rows.parquet"
    pq.write_table(pa.table({"prompt": pa.array(prompts.tolist(), pa.list_(pa.int32()))}), source)
    return source


def _run(source: Path, out: Path, options: tuple[str, ...]) -> dict[str, Any]:
    usual = ("--ignore-eos", "--kv-cache-memory", "512MiB", "--swap-space", "512MiB", "--json", "-q")
    command = [sys.executable, "-m", "batchrun", "submit", str(source), "-o", str(out), *usual, *options]
    outcome: dict[str, Any] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return outcome


def _show(work: Work, found: dict[str, list[dict[str, Any]]], *, is_equal: bool) -> None:
    click.echo(
        f"{work.name}: {work.num_rows} rows, {work.prompt_len} tokens in, {work.output_len} out; "
        f"texts are {'equal' if is_equal else 'NOT EQUAL'}"
    )
    seconds = {way: median(each["run_s"] for each in outcomes) for way, outcomes in found.items()}
    usual = seconds["one engine"]
    for way, outcomes in found.items():
        waits = outcomes[-1]["latencies"]
        per_token, first = waits["time_per_output_token_s"], waits["time_to_first_token_s"]
        runs = ", ".join(f"{each['run_s']:.2f}" for each in outcomes)
        click.echo(
            f"  {way:14} {work.num_rows / seconds[way]:7.3f} rows/s, {usual / seconds[way]:.2f} times ("
            f"{runs} s in the engine); first token p50 {first['p50']:.2f} s; "
            f"per token p50 {per_token['p50'] * 1000:.0f} ms, p99 {per_token['p99'] * 1000:.0f} ms; "
            f"{median(each['elapsed_s'] for each in outcomes):.1f} s in all"
        )


if __name__ == "__main__":
    main()
