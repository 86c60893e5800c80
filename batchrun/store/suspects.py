"""Rows that ran when a process of the job was given up, and how many processes: one of them may be at fault.

They are run last and one at a time; a row that ran when a second process was given up is not run again.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from batchrun.store.durable import storage_errors, write_file
from batchrun.store.layout import Layout, read_json


def add(at: Layout, rows: Iterable[int], tmp: Path) -> None:
    """One more process was given up while these ran, each of them perhaps as several sequences; written through a file
    in `tmp`. Raises StorageFailed."""
    counts = load(at)
    for row in {*rows}:
        counts[row] = counts.get(row, 0) + 1
    with storage_errors(at.suspects):
        write_file(at.suspects, json.dumps(counts).encode(), tmp)


def load(at: Layout) -> dict[int, int]:
    """Processes by row; empty when none was ever given up. Raises StorageFailed when it is damaged."""
    return {int(row): count for row, count in (read_json(at.suspects) or {}).items()}
