"""The command that runs some rows of a complete job again."""

from typing import Any

import click

from batchrun.cli_options import JobCommand, load_console, retry_options, typed_changes
from batchrun.cli_run import absolute, run_job
from batchrun.store.at_hand import named


@click.command(cls=JobCommand, params=retry_options())
def retry(output: str, where: str | None, **given: Any) -> None:
    """Run the failed rows of OUT again, or those that --where selects.

    New answers replace the old ones when all are there; until then OUT is as it was. The same command goes on after
    a stop. The sampling options and --on-overlong may be given anew, for these rows only.

    \b
    Example:
      batchrun retry out/reviews --where "finish_reason = 'length'" --max-tokens 512
    """
    console = load_console(given)

    from batchrun import retry as retrying

    out = absolute(named(output))
    changes = typed_changes(given)
    run_job(console, lambda observe, stop: retrying.retry(out, where, changes, observe, stop), is_retry=True)
