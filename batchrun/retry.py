"""Some rows of a complete job once more: their answers are taken back, then the job goes on as any unfinished one does.

Taking back is one rename, so a crash leaves the old job or the new; OUT keeps the old answers until the new ones are
published.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, create_model

from batchrun.errors import AnswersDiffer, InputMissing
from batchrun.job import CHANGEABLE, Job, from_outside
from batchrun.lifecycle import submit
from batchrun.observe.events import Message, Observe
from batchrun.opened import OpenedJob, open_job, stored_job
from batchrun.outcome import Outcome
from batchrun.plan.plan import load_plan
from batchrun.plan.planner import Again, make_plan
from batchrun.plan.replace import replace_rows
from batchrun.recall import Recall, giving_way
from batchrun.settings import merge, validated
from batchrun.stop import StopRequest
from batchrun.store.durable import new_name, storage_errors, sync_file
from batchrun.store.layout import read_json
from batchrun.store.parts import write_without
from batchrun.store.select import select_rows


def retry(
    output: Path | str, where: str | None, changes: Mapping[str, object], observe: Observe, stop: StopRequest
) -> Outcome:
    """Runs the rows of a complete job again for which `where` (SQL over OUT; None: those that failed) is true.

    `changes` are options of `CHANGEABLE`, for these rows only. The same call goes on with a retry that was stopped.
    The outcome's `retried` is 0 when no row matches; then nothing was done.

    Raises:
        UsageError: a condition that DuckDB does not accept, or an option that cannot be changed.
        InputMissing: there is no such job, or its result is not complete.
        AnswersDiffer: another retry of the job is unfinished.
        BatchrunError: as `submit`.
    """
    job = stored_job(output)
    asked = {"where": where or _failed(job), "changes": json.loads(json.dumps(_checked(changes)))}
    opened = open_job(job)
    heeding = Recall(job, opened.store.at, stop).heeded_by(giving_way(observe, stop))
    with opened.store.lock(job.wait_lock):
        num_rows = _unfinished(opened, asked)
        if num_rows is None:
            opened.store.fetch()
            opened.store.fetch_result()
            rows = _selected(opened, asked["where"])
            num_rows = len(rows)
            if num_rows:
                _take_back(opened, rows, asked, heeding)
    # What the job said of all its rows does not hold for these: they are computed, and each has failed before.
    return replace(submit(job.model_copy(update={"reuse": None, "abort_after": None}), observe, stop), retried=num_rows)


def _failed(job: Job) -> str:
    return f'"{job.output_prefix}error" IS NOT NULL'


def _checked(changes: Mapping[str, object]) -> dict[str, Any]:
    """The changes as the job's own options would be; raises UsageError."""
    options: dict[str, Any] = {name: (Job.model_fields[name].annotation, Job.model_fields[name]) for name in CHANGEABLE}
    model: type[BaseModel] = create_model("Changes", **options)
    given = merge(CHANGEABLE, changes, {}, None)
    checked = validated(model, {name: from_outside(name, setting) for name, setting in given.items()}, given)
    return {name: getattr(checked, name) for name in CHANGEABLE if name in given}


def _unfinished(opened: OpenedJob, asked: Mapping[str, Any]) -> int | None:
    """Rows of the retry that was asked for and is not finished; None when none is."""
    store = opened.store
    if store.is_complete and not store.holds_other(opened.identity):
        return None
    pending = read_json(store.at.retry)
    if pending is None or not store.at.overwriting.exists():
        raise InputMissing(f"{store.at.out} is not complete; batchrun resume {store.at.out} completes it")
    if differing := [name for name in asked if asked[name] != pending[name]]:
        raise AnswersDiffer(
            f"a retry of {pending['rows']:,} rows of {store.at.out} is unfinished (differing: {', '.join(differing)}); "
            f"batchrun resume {store.at.out} goes on with it"
        )
    return int(pending["rows"])


def _selected(opened: OpenedJob, where: str) -> NDArray[np.int64]:
    at, prefix = opened.store.at, opened.job.output_prefix
    with storage_errors(at.out):
        files = sorted(at.out.rglob("*.parquet"))
    return select_rows(files, where, f"{prefix}row_idx", opened.job.n, opened.store.tmp)


def _take_back(opened: OpenedJob, rows: NDArray[np.int64], asked: Mapping[str, Any], observe: Observe) -> None:
    """Makes `rows` pending, as they are to be run now."""
    store, changes = opened.store, dict(asked["changes"])
    plan = load_plan(store.at.plan)
    if plan is None:
        raise InputMissing(f"{store.at.plan} is gone, so that rows cannot be run again; --overwrite runs all of them")
    own = {name: changes.pop(name) for name in ("on_overlong",) if name in changes}
    job = validated(Job, opened.job.model_dump() | own, {}) if own else opened.job
    tokenizer = opened.load_tokenizer()
    fresh = make_plan(
        job,
        opened.files,
        tokenizer,
        opened.checkpoint.spec,
        new_name(store.tmp, "fresh"),
        observe,
        Again(rows, changes),
    )
    observe(Message("info", f"{len(rows):,} rows run again"))
    staged = new_name(store.tmp, "next")
    with storage_errors(staged):
        for name in (store.at.plan.name, store.at.parts.name):
            (staged / name).mkdir(parents=True)
        replace_rows(plan, rows, fresh, staged / store.at.plan.name, tokenizer.decode)
        write_without(store.at.list_parts(), rows, staged / store.at.parts.name, store.job_id)
        said = staged / store.at.retry.name
        said.write_text(json.dumps({**asked, "rows": len(rows)}))
        sync_file(said)
    store.take_back(staged)
