"""One worker with all cores against one worker a core, in turns: python -m tests.endurance.scaling FILE

FILE has a column `prompt`, which is answered as it is. Prints the time in the engine of each job, and the rates.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import click


@click.command()
@click.argument("file", type=click.Path(exists=True, path_type=Path))
@click.option("--rounds", default=3, help="Jobs of each kind.")
@click.option("--max-tokens", default=16, help="Tokens of every answer.")
@click.option("--kv-cache-memory", default="1GiB", help="Of each worker.")
def main(file: Path, rounds: int, max_tokens: int, kv_cache_memory: str) -> None:
    cores = len(os.sched_getaffinity(0))
    options = ("--chat", "off", "--ignore-eos", "--max-tokens", str(max_tokens), "--kv-cache-memory", kv_cache_memory)
    seconds: dict[int, list[float]] = {1: [], cores: []}
    for _ in range(rounds):
        for workers in seconds:
            outcome = _run(file, (*options, "--workers", str(workers)))
            seconds[workers].append(outcome["run_s"])
            tokens = outcome["prompt_tokens"] + outcome["output_tokens"]
            hits = outcome["cached_tokens"] / outcome["prompt_tokens"]
            click.echo(
                f"{workers} x {cores // workers} threads: {outcome['run_s']:.2f} s in the engine, "
                f"{tokens / outcome['run_s']:,.0f} tokens/s, {hits:.1%} hit, {outcome['elapsed_s']:.1f} s in all"
            )
    one, many = (median(each) for each in seconds.values())
    click.echo(f"{cores} workers take {many / one:.2f} of the time of one (medians {many:.2f} and {one:.2f} s)")


def _run(file: Path, options: tuple[str, ...]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "batchrun",
            "submit",
            str(file),
            "-o",
            f"{folder}/out",
            "--json",
            "-q",
            *options,
        ]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    outcome: dict[str, float] = json.loads(done.stdout)
    return outcome


if __name__ == "__main__":
    main()
