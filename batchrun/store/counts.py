"""How many rows a part holds and how many of them failed, readable without importing pyarrow.

The counts lie in the part's own footer, so they are as committed as its rows.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from batchrun.errors import StorageFailed
from batchrun.store.layout import Part

COUNTS_KEY = "batchrun.counts"
# The key and its value as the Parquet footer spells them: a length stands between the two strings.
_COUNTS = re.compile(rb'batchrun\.counts\x18[\x80-\xff]*[\x00-\x7f](\{"rows":\d+,"errors":\{[^}]*\}\})')
_MAGIC = b"PAR1"
_TAIL_BYTES = 1 << 14


class PartDamaged(StorageFailed):
    """A part that cannot be read back. A crash cannot leave one; a disk or a hand can."""

    def __init__(self, path: Path, reason: object) -> None:
        super().__init__(
            f"{path} is damaged ({reason}); delete this file and run the same command again: "
            "its rows are computed once more"
        )


@dataclass(frozen=True, slots=True)
class Counts:
    """Rows with a result, and how many of them failed, by the type of the error."""

    rows: int = 0
    errors: dict[str, int] = field(default_factory=dict)

    @property
    def failed(self) -> int:
        return sum(self.errors.values())

    def to_json(self) -> str:
        return json.dumps({"rows": self.rows, "errors": self.errors}, separators=(",", ":"))


def total(parts: Iterable[Part]) -> Counts:
    """The counts of all `parts` together; raises PartDamaged for one that has none."""
    rows, errors = 0, Counter[str]()
    for part in parts:
        counts = read_counts(part.path)
        rows += counts.rows
        errors.update(counts.errors)
    return Counts(rows, dict(errors))


def read_counts(path: Path) -> Counts:
    """The counts in one part's footer."""
    footer = _read_footer(path)
    found = _COUNTS.findall(footer)
    if not found:
        raise PartDamaged(path, "no batchrun.counts in its footer")
    # Column statistics come before the key-values in a footer: the last match is the footer's own.
    content = json.loads(found[-1])
    return Counts(content["rows"], content["errors"])


def _read_footer(path: Path) -> bytes:
    """The last bytes of a Parquet file: the footer, its length (4 bytes, little endian) and the magic."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(size - _TAIL_BYTES, 0))
            tail = file.read()
            footer_bytes = int.from_bytes(tail[-8:-4], "little")
            if tail[-4:] != _MAGIC or footer_bytes + 8 > size:
                raise PartDamaged(path, "not a whole Parquet file")
            if footer_bytes + 8 > len(tail):
                file.seek(size - footer_bytes - 8)
                tail = file.read()
            return tail[-footer_bytes - 8 : -8]
    except OSError as error:
        raise StorageFailed(f"cannot read {path}: {error.strerror}") from error
