"""The command that gives a result to other tools."""

import json
from dataclasses import asdict
from pathlib import Path

import click

from batchrun.errors import OutputRefused
from batchrun.filesystem import is_url
from batchrun.store.at_hand import at_hand
from batchrun.store.export_format import EXPORT_FORMATS, ExportFormat


@click.command()
@click.argument("output", metavar="OUT")
@click.option("--to", "form", type=click.Choice(EXPORT_FORMATS), required=True, help="The form.")
@click.option("--output", "-o", "target", metavar="PATH", required=True, help="File, or folder for datasets; is new.")
@click.option("--json", "is_json", is_flag=True, envvar="BATCHRUN_JSON", help="One JSON object on stdout.")
def export(output: str, form: ExportFormat, target: str, is_json: bool) -> None:
    """Write OUT as JSON Lines, OpenAI batch output or datasets folder.

    jsonl has every column of every row. openai-batch has a line for each row as the OpenAI Batch API answers it; its
    custom_id is the --id-col of the job, or else the column custom_id, or else row_idx. datasets is for
    datasets.load_from_disk.

    \b
    Example:
      batchrun export out/reviews --to jsonl -o reviews.jsonl
    """
    from batchrun.store.export import export as write

    if is_url(target):
        raise OutputRefused(f"cannot create {target}: an export is written to a disk; choose another -o")
    with at_hand(output) as job:
        job.fetch_result()
        written = write(job.at.out, form, Path(target))
    click.echo(json.dumps(asdict(written)) if is_json else written.path)
