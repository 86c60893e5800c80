"""The command that asks a running job, on whatever host, to stop."""

import json
from dataclasses import asdict

import click

from batchrun.observe.printable import one_line
from batchrun.store.at_hand import at_hand
from batchrun.store.cancel import cancel as ask


@click.command()
@click.argument("output", metavar="OUT")
@click.option("--json", "is_json", is_flag=True, envvar="BATCHRUN_JSON", help="One JSON object on stdout.")
def cancel(output: str, is_json: bool) -> None:
    """Ask the process that works on OUT to stop cleanly.

    It finishes running rows for --drain-timeout, saves and exits 75; the same command, or batchrun resume, goes on from
    there. Works from any host that sees the folder.

    \b
    Example:
      batchrun cancel out/reviews
    """
    with at_hand(output) as job:
        holder, out = ask(job), job.output
    if is_json:
        click.echo(json.dumps({"output": str(out), "holder": None if holder is None else asdict(holder)}))
    elif holder is None:
        click.echo(one_line(f"nobody works on {out}"))
    else:
        click.echo(
            one_line(f"asked process {holder.pid} on {holder.host} to stop; batchrun status {out} shows how far")
        )
