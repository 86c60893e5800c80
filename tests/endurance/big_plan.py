"""Plans many short rows, half of whose prefixes are shared, and prints the rate and the most memory it took.

python -m tests.endurance.big_plan --rows 1000000

With `--simulate 1..64` the plan is then simulated, in a process of its own; `batchrun tune echo` comes before.
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

_ROWS_A_WRITE = 100_000
_NUM_INSTRUCTIONS = 50


def write(path: Path, num_rows: int, seed: int = 1) -> None:
    """One of fifty instructions and a question of its own in every row, in random order."""
    rng = np.random.default_rng(seed)
    schema = pa.schema([("prompt", pa.string())])
    with pq.ParquetWriter(path, schema) as writer:
        for first in range(0, num_rows, _ROWS_A_WRITE):
            numbers = rng.integers(10**9, size=(min(_ROWS_A_WRITE, num_rows - first), 2)).tolist()
            prompts = [
                f"Instruction {one % _NUM_INSTRUCTIONS}: be brief. What of {one} and {two}?" for one, two in numbers
            ]
            writer.write_table(pa.table({"prompt": prompts}, schema=schema))


@click.command()
@click.option("--rows", default=1_000_000, show_default=True)
@click.option("--simulate", default=None)
def main(rows: int, simulate: str | None) -> None:
    """Print what the plan says, how long it took and the peak memory of its process."""
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, "rows.parquet")
        write(source, rows)
        arguments = ["plan", str(source), "-m", "echo", "--max-tokens", "16", "-o", str(Path(scratch, "out"))]
        began = time.perf_counter()
        command = [sys.executable, "-m", "batchrun", *arguments, "--progress", "none"]
        subprocess.run(command, check=True)
        seconds = time.perf_counter() - began
        if simulate is not None:
            began = time.perf_counter()
            process = subprocess.Popen([*command, "--simulate", simulate])
            _, _, used = os.wait4(process.pid, 0)
            click.echo(f"simulated in {time.perf_counter() - began:.1f} s, peak {used.ru_maxrss / 1024:,.0f} MiB")
    peak_mib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    click.echo(f"{rows:,} rows in {seconds:.1f} s, {rows / seconds:,.0f} rows/s, peak {peak_mib:,.0f} MiB")


if __name__ == "__main__":
    main()
