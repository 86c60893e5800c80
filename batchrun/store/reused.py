"""What a job has copied from an earlier one: written when all of it is committed, and deciding nothing but that."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from batchrun.store.durable import storage_errors, write_file
from batchrun.store.layout import Layout, read_json


@dataclass(frozen=True, slots=True)
class Reused:
    """`rows` of this job got their answer from the job `earlier`, of which `vanished` rows are not in the input."""

    earlier: str
    rows: int
    vanished: int


def write_reused(at: Layout, reused: Reused, tmp: Path) -> None:
    """Through a file in `tmp`. Raises StorageFailed."""
    with storage_errors(at.reused):
        write_file(at.reused, json.dumps(asdict(reused)).encode(), tmp)


def read_reused(at: Layout) -> Reused | None:
    """None when nothing was copied. Raises StorageFailed when that is not readable."""
    content = read_json(at.reused)
    return None if content is None else Reused(**content)
