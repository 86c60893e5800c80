"""A job folder in a temporary place, and small tables of results to commit to it."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pytest

from batchrun.store import publish as publishing
from batchrun.store import result_files
from batchrun.store.publish import publish
from batchrun.store.store import Store

RESULTS = pa.schema(
    [
        ("row_idx", pa.int64()),
        ("text", pa.string()),
        ("completion_tokens", pa.int32()),
        ("error", pa.struct([("type", pa.string()), ("message", pa.string())])),
    ]
)
FINGERPRINT = {"model": "echo", "temperature": "0.0", "inputs": "a1b2"}


@dataclass(frozen=True, slots=True)
class Bench:
    """What most tests need: OUT's path and the means to fill its parts."""

    out: Path

    @contextmanager
    def working(self, *, overwrite: bool = False, **changed: str) -> Iterator[Store]:
        """The store, locked and checked for the usual job with `changed` keys of its fingerprint."""
        store = Store.open(self.out, overwrite=overwrite)
        with store.lock():
            store.check({"output": str(self.out)}, FINGERPRINT | changed)
            # Stands for a plan, without which an unused folder is removed again.
            (store.at.plan / "plan.json").exists() or self.plan(store, 0)
            yield store

    @staticmethod
    def plan(store: Store, num_rows: int) -> None:
        store.at.plan.mkdir(exist_ok=True)
        (store.at.plan / "plan.json").write_text(f'{{"summary": {{"num_rows": {num_rows}}}, "units": []}}')

    @staticmethod
    def results(rows: Sequence[int], failed: Sequence[int] = ()) -> pa.Table:
        return pa.table(
            {
                "row_idx": list(rows),
                "text": [None if row in failed else f"answer {row}" for row in rows],
                "completion_tokens": [row % 7 for row in rows],
                "error": [{"type": "empty_prompt", "message": f"row {row}"} if row in failed else None for row in rows],
            },
            schema=RESULTS,
        )

    def commit(self, store: Store, unit: int, rows: Sequence[int], failed: Sequence[int] = ()) -> Path:
        store.done(unit)
        return store.commit(unit, self.results(rows, failed))

    def commit_shuffled(self, store: Store, num_rows: int, num_parts: int, seed: int) -> None:
        """All rows, in random order, over parts of random sizes and three units; every eleventh row failed."""
        rows = list(range(num_rows))
        chance = random.Random(seed)
        chance.shuffle(rows)
        cuts = sorted(chance.randrange(num_rows + 1) for _ in range(num_parts - 1))
        for start, stop in pairwise([0, *cuts, num_rows]):
            part = rows[start:stop]
            self.commit(store, chance.randrange(3), part, failed=[row for row in part if row % 11 == 0])

    def tree(self) -> dict[str, bytes | None]:
        """Every name beside OUT with its content: what "nothing changed" compares."""
        below = self.out.parent.rglob("*")
        return {str(path.relative_to(self.out.parent)): path.read_bytes() if path.is_file() else None for path in below}

    @staticmethod
    def publish(
        store: Store,
        batches: Sequence[pa.RecordBatch],
        kept: pa.Schema | None = None,
        shape: result_files.Shape | None = None,
    ) -> int:
        """Publishes and returns the number of rows; keeps every column of `batches` unless told otherwise."""
        schema = kept or pa.schema(list(batches[0].schema)[1:])
        return publish(store, iter(batches), schema, RESULTS, {"batchrun.model": "echo"}, shape).num_rows


def _inputs(num_rows: int, num_batches: int = 1) -> list[pa.RecordBatch]:
    """Input rows 0 … num_rows - 1 with a column `name`, in batches of uneven sizes."""
    table = pa.table({"row_idx": range(num_rows), "name": [f"row {row}" for row in range(num_rows)]})
    cuts = sorted({0, num_rows, *(num_rows * i * i // num_batches**2 for i in range(num_batches))})
    return [table.slice(a, b - a).combine_chunks().to_batches()[0] for a, b in pairwise(cuts)]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "out")


@pytest.fixture
def inputs() -> Callable[..., list[pa.RecordBatch]]:
    return _inputs


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of 189 rows in groups of 63, from windows of 17."""
    monkeypatch.setattr(publishing, "_WINDOW_ROWS", 17)
    monkeypatch.setattr(result_files, "_GROUP_ROWS", 63)
    monkeypatch.setattr(result_files, "_FILE_ROWS", 3 * 63)
