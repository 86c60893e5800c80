"""The command: `python -m batchrun_jobs.bench SOURCE (--len-col COLUMN | --max-tokens N) [--way WAY]…`."""

import json
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from batchrun.checkpoint import cache_folder, load_tokenizer, resolve
from batchrun.errors import BatchrunError, UsageError
from batchrun_jobs.bench import table, way, workload
from batchrun_jobs.bench.comparison import Comparison, compare
from batchrun_jobs.bench.options import by_peer, compared_ways
from batchrun_jobs.bench.peers import PEERS
from batchrun_jobs.bench.presence import present
from batchrun_jobs.bench.process import ChildFailedError, Processes
from batchrun_jobs.bench.threads import Threads
from batchrun_jobs.bench.workload import Workload

_COMPLAINTS_SHOWN = 20
_say = partial(click.echo, err=True)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("source", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--prompt-col", default="prompt", help="Column with the prompts, taken as they are.")
@click.option("--len-col", help="Column with the number of tokens to answer a row with.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="The same number for all rows.")
@compared_ways(way.NAMES, ("batchrun", "transformers"))
@click.option("--tie", default=0.001, help="Logits that are so close may change places.")
def main(source: Path, json_file: Path | None, **given: Any) -> None:
    """Answer the rows of SOURCE in several ways on this machine's CPU and print a table.

    Every way runs in a process of its own, by turns. Every row is answered greedily with exactly as many tokens as
    asked, so that all do the same work, and all must give the same tokens: else the exit code is 1.

    \b
    Example:
      python -m batchrun_jobs.bench mixed.parquet --len-col max_new_tokens --pin --way batchrun --way vllm
    """
    try:
        with tempfile.TemporaryDirectory() as folder:
            work, found = _compared(source, Path(folder), **given)
    except (BatchrunError, ChildFailedError) as error:
        raise click.ClickException(str(error)) from error
    rows = table.rows(found.runs, found.agreements, work, found.floor.seconds if found.floor else None)
    if rows:
        click.echo(table.text(rows))
    if found.floor is not None:
        click.echo(table.floor_text(found.floor))
    if json_file is not None:
        json_file.write_text(json.dumps(table.as_json(rows, found.runs, found.floor), indent=1), encoding="utf-8")
    sys.exit(_complain(found.complaints))


def _compared(
    source: Path,
    folder: Path,
    *,
    prompt_col: str,
    len_col: str | None,
    max_tokens: int | None,
    ways: tuple[str, ...],
    pythons: tuple[str, ...],
    model: str | None,
    threads: int | None,
    pin: bool,
    repeat: int,
    tie: float,
) -> tuple[Workload, Comparison]:
    """Raises BatchrunError or ChildFailedError."""
    length = len_col if len_col is not None else max_tokens
    if length is None or (len_col is not None and max_tokens is not None):
        raise UsageError("how long is an answer? Give --len-col or --max-tokens, one of them")
    if len(set(ways)) < len(ways):
        raise UsageError("a way is named twice")
    named = [way.parse(text, by_peer(pythons, PEERS)) for text in ways]
    checkpoint = resolve(model, revision=None, cache=cache_folder(), trust_remote_code=False)
    tokenizer = load_tokenizer(checkpoint, tokenizer=None, chat_template=None, trust_remote_code=False)
    work = workload.read(source, prompt_col, length, tokenizer)
    ready, absent = present(named, checkpoint)
    for line in absent:
        _say(line)
    if not ready:
        raise UsageError("no way is left")
    processes = Processes(folder, Threads.choose(threads, pin), checkpoint.folder)
    return work, compare(ready, work, processes, repeat=repeat, tie=tie, say=_say)


def _complain(complaints: Sequence[str]) -> int:
    """The exit code."""
    for line in complaints[:_COMPLAINTS_SHOWN]:
        _say(f"error: {line}")
    if len(complaints) > _COMPLAINTS_SHOWN:
        _say(f"error: and {len(complaints) - _COMPLAINTS_SHOWN} more")
    return 1 if complaints else 0


if __name__ == "__main__":
    main()
