"""Answers of an earlier job for the rows of this one that were asked the same: copied into parts, not computed.

Copied rows are committed as any others, so that whatever kills this, the same command goes on. Knows plans and parts;
nothing of engines or models.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from batchrun.errors import AnswersDiffer, InputMissing, StorageFailed
from batchrun.job import Job
from batchrun.observe.events import Message, Observe
from batchrun.plan.asked import is_foldable
from batchrun.plan.keys import KEY_TYPE, row_keys
from batchrun.plan.members import members, num_members
from batchrun.plan.plan import Plan, Unit, load_plan, read_unit
from batchrun.store.at_hand import at_hand
from batchrun.store.durable import new_name, remove, replace_file, storage_errors
from batchrun.store.layout import Layout, read_json
from batchrun.store.merge import MergedParts, row_indices
from batchrun.store.parts import read_answered
from batchrun.store.reused import Reused, read_reused, write_reused
from batchrun.store.samples import split
from batchrun.store.store import Store
from batchrun.tasks.task import cached_tokens


@dataclass(frozen=True, slots=True)
class Earlier:
    """An earlier job whose answers may be copied; `name` is its OUT as the user calls it.

    `results` are its columns, `wanted` the same under new names.
    """

    name: str
    at: Layout
    plan: Plan
    results: pa.Schema
    wanted: pa.Schema


def earlier_job(job: Job, store: Store, identity: dict[str, str], results: pa.Schema) -> Earlier | None:
    """The job that `--reuse` names; None where it names none, or where everything was copied already.

    `results` are the columns that this job adds to the input's.

    Raises:
        InputMissing: there is no such job, or it has no plan.
        AnswersDiffer: it was answered by another model or with other sampling.
        JobMismatch: as `Store.check`.
    """
    if job.reuse is None or (not store.holds_other(identity) and (store.is_complete or _is_copied(job.reuse, store))):
        return None
    with at_hand(job.reuse) as found:
        found.fetch()
        at = found.at
    stored, plan = read_json(at.job), load_plan(at.plan)
    if stored is None or plan is None:
        raise InputMissing(
            f"--reuse {job.reuse}: {found.called(str(at.folder))} holds no job with a plan; name the output of an "
            f"earlier job whose {at.folder.name} was kept, or leave --reuse out to compute every row"
        )
    if differing := Job.differing_answers(stored["fingerprint"], identity):
        raise AnswersDiffer(
            f"--reuse {job.reuse}: its answers are not those of this job (differing: {', '.join(differing)}); "
            "give the same options, or leave --reuse out to compute every row"
        )
    prefix = str(stored["job"]["output_prefix"])
    own = [field.with_name(prefix + field.name.removeprefix(job.output_prefix)) for field in results]
    return Earlier(job.reuse, at, plan, pa.schema(own), results)


def copy_answers(
    earlier: Earlier, job: Job, plan: Plan, store: Store, observe: Observe, *, shares_prefixes: bool
) -> Reused:
    """Commits the earlier job's answer for every row that it was asked for as well and that did not fail there.

    Rows that are in no row of this job's input are left in `store.at.vanished`. Safe to repeat at any point.

    Raises:
        StorageFailed: a part of either job cannot be read, or the disk failed; what was committed stays.
    """
    spill = new_name(store.tmp, "reuse")
    try:
        with storage_errors(spill):
            spill.mkdir()
        found = _Copying(earlier, job, plan, store, spill, shares_prefixes=shares_prefixes).run()
    finally:
        # What cannot be removed now is swept by whoever takes the lock next.
        with suppress(OSError):
            remove(spill)
    store.check_lease()
    write_reused(store.at, found, store.tmp)
    store.keep(store.at.reused)
    gone = f"; {found.vanished:,} of its rows are not in the input any more, see {store.called(str(store.at.vanished))}"
    observe(
        Message(
            "info",
            f"{found.rows:,} of {plan.summary.num_rows:,} rows are answered by {earlier.name}"
            + (gone if found.vanished else ""),
        )
    )
    return found


def foresee(earlier: Earlier, job: Job, plan: Plan) -> int:
    """How many rows of the input `copy_answers` would answer; changes nothing. Raises StorageFailed."""
    places = _match(earlier, job, plan).places
    return sum(int(num_members(table)[own >= 0].sum()) for _, table, own in _with_places(plan, places))


def _is_copied(reuse: str, store: Store) -> bool:
    before = read_reused(store.at)
    return before is not None and before.earlier == reuse


@dataclass(frozen=True, slots=True)
class _Keyed:
    """The rows of a plan that have tokens, in plan order, with their keys."""

    row_idx: NDArray[np.int64]  # [num_rows]
    prompt: pa.ChunkedArray
    answer: pa.ChunkedArray

    @classmethod
    def of(cls, plan: Plan, job: Job) -> "_Keyed":
        rows, prompt, answer = [np.empty(0, np.int64)], [], []
        for unit in plan.units:
            table = read_unit(unit)
            if _is_failed(table):
                continue
            keys = row_keys(table, is_foldable(job))
            rows.append(row_indices(table))
            prompt.append(keys.prompt)
            answer.append(keys.answer)
        return cls(np.concatenate(rows), pa.chunked_array(prompt, KEY_TYPE), pa.chunked_array(answer, KEY_TYPE))


@dataclass(frozen=True, slots=True)
class _Match:
    """The rows of both plans; `places` has for each new one where the old one with its answer is, or -1."""

    old: _Keyed
    new: _Keyed
    places: NDArray[np.int64]  # [num_new_rows]


def _match(earlier: Earlier, job: Job, plan: Plan) -> _Match:
    """Only rows that are in a part of the earlier job and did not fail there: a failure is worth another try."""
    old, new = _Keyed.of(earlier.plan, job), _Keyed.of(plan, job)
    parts = [read_answered(part, earlier.results) for part in earlier.at.list_parts()]
    answered = np.flatnonzero(np.isin(old.row_idx, np.concatenate([np.empty(0, np.int64), *parts])))
    found = pc.index_in(new.answer, value_set=old.answer.take(pa.array(answered)))
    places = found.fill_null(-1).to_numpy().astype(np.int64)
    places[places >= 0] = answered[places[places >= 0]]
    return _Match(old, new, places)


def _with_places(plan: Plan, places: NDArray[np.int64]) -> Iterator[tuple[Unit, pa.Table, NDArray[np.int64]]]:
    """The units that have tokens, with their rows and the part of `places` that is about them."""
    start = 0
    for unit in plan.units:
        table = read_unit(unit)
        if not _is_failed(table):
            yield unit, table, places[start : start + len(table)]
            start += len(table)


class _Copying:
    """One pass over both plans."""

    def __init__(
        self, earlier: Earlier, job: Job, plan: Plan, store: Store, spill: Path, *, shares_prefixes: bool
    ) -> None:
        self._earlier = earlier
        self._job = job
        self._plan = plan
        self._store = store
        self._shares_prefixes = shares_prefixes
        self._results = earlier.wanted
        self._answers = MergedParts(earlier.at.list_parts(), earlier.results, spill)

    def run(self) -> Reused:
        match = _match(self._earlier, self._job, self._plan)
        vanished = self._save_vanished(match)
        num_rows = shared_len = 0
        for unit, table, places in _with_places(self._plan, match.places):
            sources = np.full(len(table), -1)
            sources[places >= 0] = match.old.row_idx[places[places >= 0]]
            num_rows += self._commit(unit, table, sources, shared_len)
            shared_len = table.column("keep_len")[-1].as_py()
        return Reused(self._earlier.name, num_rows, vanished)

    def _save_vanished(self, match: _Match) -> int:
        """Writes the results of the old rows, duplicates included, that nobody asks for any more; how many."""
        is_kept = pc.is_in(match.old.prompt, value_set=match.new.prompt).to_numpy()
        kept = set(match.old.row_idx[is_kept].tolist())
        gone = []
        for unit in self._earlier.plan.units:
            table = read_unit(unit)
            if not _is_failed(table):
                is_gone = np.array([row not in kept for row in table.column("row_idx").to_pylist()], dtype=np.bool_)
                gone.append(members(table).rows[np.repeat(is_gone, num_members(table))])
        found = self._answers.find(np.sort(np.concatenate([np.empty(0, np.int64), *gone])))
        temporary = new_name(self._store.tmp, self._store.at.vanished.name)
        with storage_errors(self._store.at.vanished):
            pq.write_table(split(found, self._job.n), temporary, compression="zstd")
            replace_file(temporary, self._store.at.vanished)
            self._store.keep(self._store.at.vanished)
        return int(found.num_rows)

    def _commit(self, unit: Unit, table: pa.Table, sources: NDArray[np.int64], shared_len: int) -> int:
        """Commits the rows of a unit whose answer is that of the old row in `sources` and that are not done yet.

        How many rows of the input have such an answer, those that were done before included.
        """
        has_source = sources >= 0
        is_due = has_source & ~np.isin(row_indices(table), self._store.done(unit.index))
        if is_due.any():
            self._store.commit(unit.index, self._copies(table, np.flatnonzero(is_due), sources, shared_len))
        return int(num_members(table)[has_source].sum())

    def _copies(self, table: pa.Table, due: NDArray[np.int64], sources: NDArray[np.int64], shared_len: int) -> pa.Table:
        """The result rows of the unit's rows `due` and of their duplicates, as they would have been computed."""
        wanted = np.unique(sources[due])
        found = self._answers.find(wanted)
        if len(found) != len(wanted):
            raise StorageFailed(f"{self._earlier.name} has changed meanwhile; run the same command again")
        asked = members(table.take(due))
        answers = found.take(np.searchsorted(wanted, sources[due][asked.which])).rename_columns(self._results.names)
        before = np.concatenate([[shared_len], table.column("keep_len").to_numpy()[:-1]])
        prefix = self._job.output_prefix
        cached = np.zeros(len(asked.rows), np.int64)
        if self._shares_prefixes:
            pairs = zip(
                before[due][asked.which].tolist(), answers.column(f"{prefix}prompt_tokens").to_pylist(), strict=True
            )
            cached = np.array([cached_tokens(self._job, *pair) for pair in pairs], np.int64)
        for name, values in ((f"{prefix}row_idx", asked.rows), (f"{prefix}cached_tokens", cached)):
            at = self._results.get_field_index(name)
            answers = answers.set_column(
                at, self._results.field(at), pa.array(values).cast(self._results.field(at).type)
            )
        return answers


def _is_failed(unit: pa.Table) -> bool:
    """Whether it is a unit of rows that failed in planning: these have no prompt that could be compared."""
    return bool(unit.column("error").null_count < unit.num_rows)
