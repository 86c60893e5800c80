"""A sample of a complete job's rows computed once more, beside it, and compared with what OUT says.

Changes nothing of the job: it works in a temporary folder in the user's cache, on the part of the plan that the sample
needs.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter, ValidationError

from batchrun.checkpoint import cache_folder
from batchrun.errors import InputMissing, UsageError
from batchrun.executors import local
from batchrun.observe.events import Observe
from batchrun.opened import OpenedJob, open_job, stored_job
from batchrun.option_types import Rate
from batchrun.plan.plan import Plan, load_plan
from batchrun.plan.replace import keep_rows
from batchrun.stop import StopRequest
from batchrun.store.durable import new_name
from batchrun.store.merge import MergedParts, row_indices
from batchrun.store.parts import read_answered
from batchrun.store.store import Store
from batchrun.tokenizer import Tokenizer

_SEED = 0
_SHARE: TypeAdapter[float] = TypeAdapter(Annotated[Rate, Field(gt=0, le=1)])


@dataclass(frozen=True, slots=True)
class Difference:
    """A row whose text came out otherwise; from `token` on, counted from 0 in the text's tokens.

    `sample_idx` is None where rows have one sample.
    """

    row_idx: int
    token: int
    was: str | None
    now: str | None
    sample_idx: int | None = None

    @property
    def sample(self) -> str:
        """Which one of its row's, to be read after the row's number."""
        return "" if self.sample_idx is None else f", sample {self.sample_idx}"


@dataclass(frozen=True, slots=True)
class Rerun:
    """`rows` of the result were computed again; all that are not among `differences` have the same text."""

    rows: int
    differences: tuple[Difference, ...]

    @property
    def match_rate(self) -> float:
        return 1 - len(self.differences) / self.rows if self.rows else 1.0


def share_of(text: str) -> float:
    """ "0.1%" or "0.001" as a share of 1. Raises UsageError."""
    try:
        return _SHARE.validate_python(text)
    except ValidationError:
        raise UsageError(f"--rerun should be a rate above 0 such as 0.1% or 0.001, not {text!r}") from None


def rerun(output: Path | str, share: float, observe: Observe, stop: StopRequest) -> Rerun:
    """Computes a share of the rows that did not fail again, one at least; always the same ones.

    Raises:
        InputMissing: there is no such job, or it is not complete.
        JobMismatch: the model or the input is not that of the job any more.
        BatchrunError: as `lifecycle.submit`.
    """
    opened = open_job(stored_job(output))
    if opened.job.task != "generate":
        raise UsageError(f"--rerun compares texts, and {output} is of --task {opened.job.task}")
    opened.store.fetch()
    plan = load_plan(opened.store.at.plan)
    if plan is None or not opened.store.is_complete:
        raise InputMissing(f"{output} is not complete; batchrun resume {output} completes it")
    # What was changed since would be taken for an answer that does not come out again.
    opened.store.holds_other(opened.identity)
    rows = _sample(opened.store, opened, share)
    cache_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_folder(), prefix="rerun-") as folder:
        beside = Store.open(Path(folder) / "out")
        with beside.lock():
            beside.check(opened.job.model_dump(mode="json"), opened.identity)
            beside.at.plan.mkdir()
            tokenizer = opened.load_tokenizer()
            smaller = keep_rows(plan, rows, beside.at.plan)
            _run(opened, smaller, tokenizer, beside, observe, stop)
            now, was = (_texts(store, opened, rows, beside.tmp) for store in (beside, opened.store))
    num_samples = opened.job.n
    differing = [
        Difference(
            row // num_samples,
            _first_difference(tokenizer, before, after),
            before,
            after,
            row % num_samples if num_samples > 1 else None,
        )
        for row, before, after in zip(rows.tolist(), was, now, strict=True)
        if before != after
    ]
    return Rerun(len(rows), tuple(differing))


def _sample(store: Store, opened: OpenedJob, share: float) -> NDArray[np.int64]:
    schema = opened.results
    answered = [read_answered(part, schema) for part in store.at.list_parts()]
    rows = np.sort(np.concatenate([np.empty(0, np.int64), *answered]))
    num_rows = min(len(rows), max(1, round(share * len(rows))))
    return np.sort(np.random.default_rng(_SEED).choice(rows, num_rows, replace=False))


def _run(
    opened: OpenedJob, plan: Plan, tokenizer: Tokenizer, beside: Store, observe: Observe, stop: StopRequest
) -> None:
    if not plan.units:
        return
    ran = local.run(opened.job, plan, opened.checkpoint, tokenizer, beside, observe, stop)
    if not ran.is_complete:
        raise stop.error("nothing is kept of a rerun")


def _texts(store: Store, opened: OpenedJob, rows: NDArray[np.int64], tmp: Path) -> list[str | None]:
    spill = new_name(tmp, "runs")
    spill.mkdir()
    schema = opened.results
    found = MergedParts(store.at.list_parts(), schema, spill).find(rows)
    assert np.array_equal(row_indices(found), rows), "a row of the sample has no result"
    texts: list[str | None] = found.column(f"{opened.job.output_prefix}text").to_pylist()
    return texts


def _first_difference(tokenizer: Tokenizer, was: str | None, now: str | None) -> int:
    one, other = tokenizer.encode([was or "", now or ""], add_special_tokens=False)
    common = min(len(one), len(other))
    unequal = np.flatnonzero(np.asarray(one[:common]) != np.asarray(other[:common]))
    return int(unequal[0]) if len(unequal) else common
