"""Writes what there is to tell of a job: report.html and summary.json in its folder."""

import json
from dataclasses import dataclass
from pathlib import Path

from batchrun.report.facts import Facts, gather
from batchrun.report.page import render
from batchrun.report.summary import summarised
from batchrun.store.durable import storage_errors, write_file
from batchrun.store.layout import Layout


@dataclass(frozen=True, slots=True)
class Report:
    """What was written, and of what."""

    page: Path
    summary: Path
    facts: Facts


def write_report(out: Path, name: str | None = None) -> Report:
    """Both files, each whole or not at all; may be called while the job runs. They call OUT `name`, or by its path.

    Raises:
        InputMissing: there is no such job.
        StorageFailed: something of the job cannot be read, or the report cannot be written.
    """
    at = Layout(out)
    facts = gather(out, name or str(out.absolute()))
    with storage_errors(at.folder):
        # The temporary names lie beside: those in `tmp` are swept by whoever takes the lock.
        write_file(at.summary, json.dumps(summarised(facts), indent=1).encode(), at.folder)
        write_file(at.report, render(facts).encode(), at.folder)
    return Report(at.report, at.summary, facts)
