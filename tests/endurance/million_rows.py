"""How soon a large stored job is at work again, in how much memory, and whether memory grows while it runs.

    python -m tests.endurance.million_rows resume --rows 1000000
    python -m tests.endurance.million_rows memory --rows 1000000

`resume` plans the rows, commits the answers of all but the last of them as so many parts, and starts the job: it is at
work when a new part is there. `memory` runs the whole job and compares the mean resident memory over the last tenth of
its rows with that over the first, and says what share of the time went into recording. Exit status 1: more than the
given limits.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import click
import numpy as np
import pyarrow as pa

from batchrun.opened import open_job, stored_job
from batchrun.plan.plan import load_plan, read_unit
from batchrun.store.layout import Layout
from batchrun.store.store import Store
from tests.endurance.big_plan import write

_TAIL_ROWS = 2000


def command(verb: str, source: Path, out: Path) -> list[str]:
    options = ("-m", "echo", "--max-tokens", "4", "--checkpoint-every", "0.5s", "--progress", "none", "-q")
    return [sys.executable, "-m", "batchrun", verb, str(source), "-o", str(out), *options]


def rss_mib(process: subprocess.Popen[bytes], field: str) -> float:
    """`VmRSS`, what is resident now, or `VmHWM`, the most that was; 0 when the process is gone."""
    try:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(field + ":")), 0.0)


def commit_all_but(out: Path, tail_rows: int, num_parts: int) -> None:
    """Answers for all planned rows but the last ones of the plan, each unit in as many parts as it has of the rows."""
    store = Store.open(out)
    plan = load_plan(store.at.plan)
    assert plan is not None
    schema, left = open_job(stored_job(str(out))).results, plan.summary.num_rows - tail_rows
    rows_a_part = max(1, plan.summary.num_rows // num_parts)
    with store.lock():
        for unit in plan.units:
            store.done(unit.index)
            rows = _input_rows(read_unit(unit))[:left]
            left -= len(rows)
            for start in range(0, len(rows), rows_a_part):
                store.commit(unit.index, _answers(rows[start : start + rows_a_part], schema))


def _input_rows(unit: pa.Table) -> np.ndarray:
    return np.concatenate([unit.column("row_idx").to_numpy(), unit.column("duplicates").combine_chunks().flatten()])


def _answers(rows: np.ndarray, schema: pa.Schema) -> pa.Table:
    columns = [pa.array(rows)]
    for field in list(schema)[1:]:
        value = {"text": "abc", "finish_reason": "length"}.get(field.name)
        value = 4 if pa.types.is_integer(field.type) else value
        columns.append(pa.array([value] * len(rows), field.type))
    return pa.Table.from_arrays(columns, schema=schema)


def samples(process: subprocess.Popen[bytes], at: Layout, num_rows: int) -> Iterator[tuple[int, float]]:
    """While it runs: in which tenth of its rows it is, from 0, and the memory of the process."""
    while process.poll() is None:
        progress = at.read_progress()
        rows_done = progress.get("rows_done", 0)
        if progress.get("status") == "in_progress" and 0 < rows_done < num_rows:
            yield 10 * rows_done // num_rows, rss_mib(process, "VmRSS")
        time.sleep(0.2)


@click.group()
def main() -> None:
    """Measure a large job."""


@main.command()
@click.option("--rows", default=1_000_000, show_default=True)
@click.option("--parts", default=1000, show_default=True)
@click.option("--within", default=10.0, show_default=True, help="Seconds.")
@click.option("--mib", default=500.0, show_default=True)
def resume(rows: int, parts: int, within: float, mib: float) -> None:
    """Time until a stored job commits again, and the memory that this took."""
    with tempfile.TemporaryDirectory() as scratch:
        source, out = Path(scratch, "rows.parquet"), Path(scratch, "out")
        write(source, rows)
        subprocess.run(command("plan", source, out), check=True, stdout=subprocess.DEVNULL)
        commit_all_but(out, _TAIL_ROWS, parts)
        at = Layout(out)
        num_parts, began = len(at.list_parts()), time.perf_counter()
        process = subprocess.Popen(command("submit", source, out), stdout=subprocess.DEVNULL)
        while len(at.list_parts()) == num_parts and process.poll() is None:
            time.sleep(0.02)
        seconds, peak = time.perf_counter() - began, rss_mib(process, "VmHWM")
        assert process.wait() == 0
        whole_s = time.perf_counter() - began
        again = time.perf_counter()
        subprocess.run(command("submit", source, out), check=True, stdout=subprocess.DEVNULL)
        again_s = time.perf_counter() - again
    click.echo(
        f"{rows:,} rows in {num_parts:,} parts: at work again after {seconds:.1f} s with {peak:,.0f} MiB at most, "
        f"published after {whole_s:.0f} s; the complete job once more: {again_s:.2f} s"
    )
    sys.exit(0 if seconds < within and peak < mib else 1)


@main.command()
@click.option("--rows", default=1_000_000, show_default=True)
@click.option("--growth", default=0.05, show_default=True, help="Of the last tenth over the first.")
def memory(rows: int, growth: float) -> None:
    """Memory over a whole run, the first tenth of its rows against the last."""
    with tempfile.TemporaryDirectory() as scratch:
        source, out = Path(scratch, "rows.parquet"), Path(scratch, "out")
        write(source, rows)
        began = time.perf_counter()
        process = subprocess.Popen([*command("submit", source, out), "--json"], stdout=subprocess.PIPE)
        seen = list(samples(process, Layout(out), rows))
        outcome = json.loads(process.communicate()[0])
        assert process.returncode == 0
        seconds = time.perf_counter() - began
    tenths = [fmean(mib for tenth, mib in seen if tenth == each) for each in range(10)]
    click.echo(
        f"{rows:,} rows in {seconds:.0f} s, {len(seen):,} samples; resident MiB by tenth of the rows: "
        + " ".join(f"{mib:.1f}" for mib in tenths)
        + f"; the last over the first: {tenths[-1] / tenths[0] - 1:+.1%}"
    )
    click.echo(
        f"of {outcome['run_s']:.0f} s in the engine went into progress, series and metrics "
        f"{outcome['recording_s'] / outcome['run_s']:.2%}, into saving {outcome['checkpoint_s'] / outcome['run_s']:.2%}"
    )
    sys.exit(0 if tenths[-1] <= tenths[0] * (1 + growth) else 1)


if __name__ == "__main__":
    main()
