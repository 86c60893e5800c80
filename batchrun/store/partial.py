"""The token ids of unfinished rows, saved so that a resumed row goes on where it stopped."""

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa

from batchrun.errors import StorageFailed
from batchrun.store.durable import new_name, replace_file, storage_errors
from batchrun.store.layout import Layout

_SCHEMA = pa.schema([("row_idx", pa.int64()), ("token_ids", pa.list_(pa.int32()))])


def save(at: Layout, rows: Mapping[int, tuple[int, ...]], tmp: Path) -> None:
    """Replaces what was saved before, whole or not at all, through a file in `tmp`. Raises StorageFailed."""
    table = pa.table({"row_idx": list(rows), "token_ids": [list(ids) for ids in rows.values()]}, schema=_SCHEMA)
    temporary = new_name(tmp, at.partial.name)
    with storage_errors(at.partial):
        try:
            with pa.OSFile(str(temporary), "wb") as file, pa.ipc.new_file(file, _SCHEMA) as writer:
                writer.write_table(table)
            replace_file(temporary, at.partial)
        finally:
            temporary.unlink(missing_ok=True)


def load(at: Layout) -> dict[int, tuple[int, ...]]:
    """What was saved last; empty when nothing was. Raises StorageFailed when it is damaged."""
    try:
        with pa.OSFile(str(at.partial), "rb") as file:
            table = pa.ipc.open_file(file).read_all()
    except FileNotFoundError:
        return {}
    except (pa.ArrowException, OSError) as error:
        raise StorageFailed(
            f"{at.partial} is damaged; delete this file and run the same command again: the rows in it start again"
        ) from error
    rows, ids = table.column("row_idx").to_pylist(), table.column("token_ids").to_pylist()
    return {row: tuple(tokens) for row, tokens in zip(rows, ids, strict=True)}
