"""What is asked on the command line of every comparison: the ways, their Pythons, the model, threads and repeats."""

from collections.abc import Callable, Collection, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import click

from batchrun.errors import UsageError

Command = Callable[..., Any]


def compared_ways(names: Sequence[str], usual: tuple[str, ...]) -> Callable[[Command], Command]:
    """Gives a command the options; `names` are the ways that it knows, `usual` those that it compares by itself."""
    options = (
        click.option(
            "--way",
            "ways",
            multiple=True,
            default=usual,
            metavar="NAME[:KEY=VALUE,...]",
            help=f"{', '.join(names)}. Repeatable; the first is what the others are compared with.",
        ),
        click.option(
            "--python", "pythons", multiple=True, metavar="PEER=FILE", help="The Python that has a peer. Repeatable."
        ),
        click.option("--model", "-m", help="As for batchrun submit."),
        click.option("--threads", type=int, metavar="N", help="Threads of every way. Default: one a core."),
        click.option("--pin", is_flag=True, help="Bind each thread to a core of its own, in every way."),
        click.option("--repeat", type=click.IntRange(min=1), default=3, help="Runs of each way, by turns."),
        click.option(
            "--json",
            "json_file",
            type=click.Path(dir_okay=False, path_type=Path),
            help="All numbers, in a file.",
        ),
    )
    return lambda command: reduce(lambda given, option: option(given), reversed(options), command)


def by_peer(pairs: tuple[str, ...], peers: Collection[str]) -> dict[str, str]:
    """The Python of each peer that has its own. Raises UsageError."""
    chosen = {}
    for pair in pairs:
        name, equals, python = pair.partition("=")
        if not equals or name not in peers:
            raise UsageError(f"--python {pair}: should be PEER=FILE, where PEER is one of {', '.join(peers)}")
        # Children work in a folder of their own.
        chosen[name] = str(Path(python).absolute())
    return chosen
