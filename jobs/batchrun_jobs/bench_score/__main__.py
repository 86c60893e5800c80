"""The command: `python -m batchrun_jobs.bench_score SOURCE --choices-col COLUMN [--way WAY]…`."""

import json
import sys
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path

import click

from batchrun.checkpoint import cache_folder, load_tokenizer, resolve
from batchrun.errors import BatchrunError, UsageError
from batchrun_jobs.bench import way
from batchrun_jobs.bench.options import by_peer, compared_ways
from batchrun_jobs.bench.presence import present
from batchrun_jobs.bench.process import ChildFailedError, Processes
from batchrun_jobs.bench.table import floor_text
from batchrun_jobs.bench.threads import Threads
from batchrun_jobs.bench_score import workload
from batchrun_jobs.bench_score.comparison import Compared, compare, table
from batchrun_jobs.bench_score.ways import SCORING
from batchrun_jobs.bench_score.workload import ScoreWorkload

_say = partial(click.echo, err=True)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("source", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--prompt-col", default="prompt", help="Column with the prompts, taken as they are.")
@click.option("--choices-col", default="choices", help="Column with lists of texts to score behind the prompts.")
@compared_ways(SCORING.names, ("batchrun", "lm-eval"))
@click.option("--tolerance", default=1e-4, help="How far log-likelihoods may be apart, for each token.")
def main(
    source: Path,
    prompt_col: str,
    choices_col: str,
    ways: tuple[str, ...],
    pythons: tuple[str, ...],
    model: str | None,
    threads: int | None,
    pin: bool,
    repeat: int,
    tolerance: float,
    json_file: Path | None,
) -> None:
    """Score the choices of SOURCE in several ways on this machine's CPU and print a table.

    Every way runs in a process of its own, by turns. All must give the same log-likelihoods: else the exit code is 1.

    \b
    Example:
      python -m batchrun_jobs.bench_score quiz.parquet --pin --way batchrun --way lm-eval:batch_size=8
    """
    try:
        named = [way.parse(text, by_peer(pythons, SCORING.peers), SCORING) for text in dict.fromkeys(ways)]
        checkpoint = resolve(model, revision=None, cache=cache_folder(), trust_remote_code=False)
        tokenizer = load_tokenizer(checkpoint, tokenizer=None, chat_template=None, trust_remote_code=False)
        work = workload.read(source, prompt_col, choices_col, tokenizer)
        ready, absent = present(named, checkpoint)
        for line in absent:
            _say(line)
        if not ready:
            raise UsageError("no way is left")
        with tempfile.TemporaryDirectory() as folder:
            processes = Processes(Path(folder), Threads.choose(threads, pin), checkpoint.folder)
            found = compare(ready, work, processes, repeat=repeat, say=_say)
    except (BatchrunError, ChildFailedError) as error:
        raise click.ClickException(str(error)) from error
    _show(found, work)
    if json_file is not None:
        json_file.write_text(json.dumps(asdict(found), indent=1), encoding="utf-8")
    wrong = [f"{name} is {apart:.1e} apart for each token" for name, apart in found.apart.items() if apart > tolerance]
    for line in (*found.failed, *wrong):
        _say(f"error: {line}")
    sys.exit(1 if found.failed or wrong else 0)


def _show(found: Compared, work: ScoreWorkload) -> None:
    if found.runs:
        click.echo(table(found, work))
    if found.floor is not None:
        click.echo(floor_text(found.floor))


if __name__ == "__main__":
    main()
