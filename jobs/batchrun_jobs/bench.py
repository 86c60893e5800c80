"""Compares ways of answering the same rows on this machine, each in a process of its own, alternating.

    python -m batchrun_jobs.bench mixed.parquet --len-col max_new_tokens --way chunked --way static --way transformers

Every row generates exactly as many tokens as `--len-col` says, so that all ways do the same work. The ways are
batchrun's schedules and `transformers`, which is `model.generate` on batches of `--batch-size` rows in the order of
their output lengths. Only the answering is timed, not the loading. `first` is the time from a row's arrival in the
engine to its first token, `next` that from one token of a row to its next: median and 99th percentile of a way's first
run, seconds.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import click
import pyarrow as pa
import pyarrow.parquet as pq

from batchrun.engine.policies import Schedule
from batchrun.errors import DataError

WAYS = (*get_args(Schedule), "transformers")


@dataclass(frozen=True, slots=True)
class Measured:
    """One run: seconds, tokens, the share of the batch's places that did useful work (0 to 1), and what rows waited for
    their tokens, as `Latencies.summary` has it."""

    seconds: float
    output_tokens: int
    occupancy: float
    texts: tuple[str, ...]
    latencies: dict[str, dict[str, float]] = field(default_factory=dict)


@click.command()
@click.argument("source", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--prompt-col", default="prompt", show_default=True, help="Column with the prompts.")
@click.option("--len-col", required=True, help="Column with the number of tokens to generate.")
@click.option("--way", "ways", multiple=True, type=click.Choice(WAYS), default=("chunked", "static"), show_default=True)
@click.option("--model", "-m", help="As for batchrun submit.")
@click.option("--batch-size", default=32, show_default=True, help="Rows in a batch of static and transformers.")
@click.option("--repeat", default=1, show_default=True, help="Times each way is run, in turn.")
def main(
    source: Path, prompt_col: str, len_col: str, ways: tuple[str, ...], model: str | None, batch_size: int, repeat: int
) -> None:
    """Time several ways of answering the rows of SOURCE and print a table."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            work = Work.prepare(source, prompt_col, len_col, Path(folder), model, batch_size)
        except DataError as error:
            raise click.ClickException(str(error)) from error
        runs: dict[str, list[Measured]] = {way: [] for way in ways}
        for _ in range(repeat):
            for way in ways:
                runs[way].append(work.measure(way))
                click.echo(f"{way}: {runs[way][-1].seconds:.1f} s", err=True)
        click.echo(_table(runs, work.num_rows))


@dataclass(frozen=True, slots=True)
class Work:
    """The rows to answer, as every way reads them."""

    folder: Path
    num_rows: int
    model: str | None
    batch_size: int

    @classmethod
    def prepare(
        cls, source: Path, prompt_col: str, len_col: str, folder: Path, model: str | None, batch_size: int
    ) -> "Work":
        """Copies the two columns that matter. Raises DataError when one is missing."""
        table = pq.read_table(source)
        for name in (prompt_col, len_col):
            if name not in table.column_names:
                raise DataError(f"{source} has no column {name!r}; it has: {', '.join(table.column_names)}")
        lengths = table.column(len_col).cast(pa.int64())
        params = pa.array([json.dumps({"max_tokens": length}) for length in lengths.to_pylist()])
        pq.write_table(pa.table({"prompt": table.column(prompt_col), "params": params}), folder / "rows.parquet")
        return cls(folder, table.num_rows, model, batch_size)

    def measure(self, way: str) -> Measured:
        """Runs one way to its end in a child process."""
        return self._transformers() if way == "transformers" else self._batchrun(way)

    def _batchrun(self, schedule: str) -> Measured:
        out = self.folder / "out"
        command = ["submit", str(self.folder / "rows.parquet"), "-o", str(out), "--overwrite", "--json", "-q"]
        command += ["--prompt-col", "prompt", "--params-col", "params", "--chat", "off", "--ignore-eos"]
        command += ["--schedule", schedule, *(["-m", self.model] if self.model else [])]
        if schedule == "static":
            command += ["--max-num-seqs", str(self.batch_size)]
        outcome = json.loads(_child("-m", "batchrun", *command))
        rows = pa.concat_tables([pq.read_table(file) for file in sorted(out.glob("*.parquet"))])
        texts = tuple(rows.column("text").to_pylist())
        return Measured(outcome["run_s"], outcome["output_tokens"], outcome["occupancy"], texts, outcome["latencies"])

    def _transformers(self) -> Measured:
        here = Path(__file__).with_name("transformers_way.py")
        said = _child(str(here), str(self.folder / "rows.parquet"), str(self.batch_size), self.model or "")
        measured = json.loads(said)
        return Measured(**{**measured, "texts": tuple(measured["texts"])})


def _child(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.splitlines()[-1]


def _table(runs: dict[str, list[Measured]], num_rows: int) -> str:
    """A line a way: medians, the ratio to the first way's time, and how many texts equal the first way's."""
    first = next(iter(runs.values()))
    base = statistics.median(run.seconds for run in first)
    lines = [
        f"{'way':14}{'s':>9}{'rows/s':>9}{'tok/s':>9}{'useful':>8}{'ratio':>7}{'equal texts':>13}"
        f"{'first p50':>11}{'p99':>8}{'next p50':>10}{'p99':>8}"
    ]
    for way, measured in runs.items():
        seconds = statistics.median(run.seconds for run in measured)
        equal = sum(ours == theirs for ours, theirs in zip(measured[0].texts, first[0].texts, strict=True))
        lines.append(
            f"{way:14}{seconds:9.1f}{num_rows / seconds:9.2f}{measured[0].output_tokens / seconds:9.1f}"
            f"{measured[0].occupancy:8.0%}{seconds / base:7.2f}{f'{equal}/{num_rows}':>13}"
            f"{_waits(measured[0], 'time_to_first_token_s'):>19}{_waits(measured[0], 'time_per_output_token_s'):>18}"
        )
    return "\n".join(lines)


def _waits(run: Measured, latency: str) -> str:
    """Its median and its 99th percentile, where they were measured."""
    found = run.latencies.get(latency, {})
    return "".join(f"{found[name]:8.3f}" if name in found else f"{'-':>8}" for name in ("p50", "p99"))


if __name__ == "__main__":
    main()
