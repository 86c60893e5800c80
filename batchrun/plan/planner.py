"""Makes a plan: every row rendered, tokenised, put in order, cut into units, and counted, before a weight is loaded."""

import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchrun.errors import StorageFailed, UsageError
from batchrun.observe.events import Observe, PlanProgress
from batchrun.plan.asked import Size, is_foldable, size_of
from batchrun.plan.cells import row_numbers
from batchrun.plan.estimate import PeakTokens, element_bytes
from batchrun.plan.fit import effective_max_model_len
from batchrun.plan.ids import UniqueIds
from batchrun.plan.order import Order, OrderedRows
from batchrun.plan.plan import Plan, PlanSummary, sync_path, write_plan
from batchrun.plan.prefixes import write_prefixes
from batchrun.plan.prompt import PromptRenderer, Rendered
from batchrun.plan.samples import Samples
from batchrun.plan.source import InputFiles, require_column, scan
from batchrun.plan.units import Unit, UnitWriter

if TYPE_CHECKING:
    from batchrun.job import Job
    from batchrun.model_spec import ModelSpec
    from batchrun.tokenizer import Tokenizer

_USUAL_NUM_SEQS = 256  # where the job names none and the device is not known yet


@dataclass(frozen=True, slots=True)
class Again:
    """Rows to plan once more, each with these sampling parameters, whatever the row's own say; samples are counted."""

    rows: NDArray[np.int64]  # [num_rows]
    params: Mapping[str, Any]


def make_plan(
    job: "Job",
    files: InputFiles,
    tokenizer: "Tokenizer",
    spec: "ModelSpec",
    folder: Path,
    observe: Observe | None = None,
    again: Again | None = None,
) -> Plan:
    """Plans the job into `folder`, replacing a plan that is there. Memory is bounded, whatever the input's size.

    The same job, files and tokenizer give the same plan. With `again` it has some of the rows only.

    Raises:
        DataError: a column, template or id that does not fit, or a file that cannot be decoded.
        InputMissing: a file that is gone.
        UsageError: options that the model cannot serve.
        StorageFailed: the plan cannot be written.
    """
    if spec.has_states and job.num_beams > 1:
        raise UsageError(f"{spec.name} keeps states, which beams cannot fork; leave out --num-beams")
    renderer = PromptRenderer(job, tokenizer, spec, files.schema, again.params if again else None)
    for name, option in ((job.id_col, "--id-col"), *((name, "--keep-cols") for name in job.keep_cols or ())):
        if name is not None:
            require_column(files.schema, name, option)
    staging = folder.with_name(folder.name + ".tmp")
    try:
        shutil.rmtree(staging, ignore_errors=True)
        (staging / "scratch").mkdir(parents=True)
        planner = _Planner(job, renderer, spec, staging, tokenizer.decode, observe or _ignore, again)
        planner.render(files)
        planner.order()
        plan = planner.finish()
        shutil.rmtree(staging / "scratch")
        _publish(plan, staging, folder)
    except OSError as error:
        raise StorageFailed(f"cannot write the plan {folder}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return _at(plan, folder)


@dataclass(slots=True)
class _Tally:
    """What is counted on the way; the fields are those of `PlanSummary`."""

    num_rows: int = 0
    num_unique: int = 0
    num_duplicates: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    error_examples: dict[str, str] = field(default_factory=dict)
    prompt_tokens: int = 0
    unique_prompt_tokens: int = 0
    duplicate_tokens: int = 0
    max_tokens_total: int = 0
    longest_prompt: int = 0
    longest_prompt_row: int | None = None
    longest_len: int = 0
    sample: str = ""
    sample_row: int | None = None
    asked_tokens: int = 0


class _Planner:
    """Carries out the stages one after the other."""

    def __init__(
        self,
        job: "Job",
        renderer: PromptRenderer,
        spec: "ModelSpec",
        staging: Path,
        decode: Callable[[Sequence[int]], str],
        observe: Observe,
        again: Again | None,
    ) -> None:
        self._job = job
        self._decode = decode
        self._renderer = renderer
        self._observe = observe
        self._has_states = spec.has_states
        self._kv_bytes_per_token = spec.kv_bytes_per_token(element_bytes(job))
        self._max_model_len = effective_max_model_len(job, spec)
        self._size = size_of(job)
        self._is_foldable = is_foldable(job)
        self._scratch = staging / "scratch"
        self._order = Order(self._scratch)
        self._writer = UnitWriter(staging)
        self._peak = PeakTokens((job.max_num_seqs or _USUAL_NUM_SEQS) // job.num_beams, job.block_size)
        self._tally = _Tally()
        self._folder = staging
        self._again = again
        self._samples = Samples(job.n, None if again is None else again.rows)
        self._id_column = job.id_col or renderer.id_column

    def render(self, files: InputFiles) -> None:
        """Every row becomes tokens to be sorted, or a failed row."""
        ids = self._ids()
        columns = [*self._renderer.columns, *([self._id_column] if self._id_column else [])]
        for whole in scan(files, columns, self._job.limit):
            batch = self._wanted(whole)
            rendered = self._renderer.render(batch)
            self._keep(rendered)
            if ids is not None:
                ids.add(batch)
            self._observe(PlanProgress(self._tally.num_rows, "render"))
        self._observe(PlanProgress(self._tally.num_rows, "render", is_last=True))
        if ids is not None:
            ids.check()

    def order(self) -> None:
        """The rows in plan order, counted and cut into units."""
        tally = self._tally
        shared_with_last = 0
        for rows in self._samples.spread(self._order.sorted(self._is_foldable), self._is_foldable):
            lengths = rows.lengths
            sizes = [self._size(params) for params in rows.params]
            output_len = self._room_behind(lengths, [size.output_len for size in sizes])
            shared = np.concatenate([[shared_with_last], rows.keep_len[:-1].astype(np.int64)])
            # In whole blocks; of a block that is shared in part each row has its own, as it has of its last token's.
            # So have its beams.
            size = self._job.block_size
            kept = np.zeros_like(lengths) if self._has_states else np.minimum(shared, lengths - 1) // size * size
            shared_with_last = int(rows.keep_len[-1])
            whole = -(-(lengths + output_len) // size) * size
            forked = (self._job.num_beams - 1) * (whole - lengths // size * size)
            self._peak.add(kept, whole + forked, np.zeros_like(lengths))
            self._writer.add(rows, output_len)
            self._count(rows, shared, output_len, sizes)
            self._observe(PlanProgress(tally.num_unique + tally.num_duplicates, "order"))
        self._observe(PlanProgress(tally.num_unique + tally.num_duplicates, "order", is_last=True))

    def finish(self) -> Plan:
        """The plan as it lies in the staging folder, its units written."""
        units = self._writer.finish()
        write_prefixes(self._folder, units, self._decode)
        tally = {name: getattr(self._tally, name) for name in _Tally.__slots__}
        summary = PlanSummary(
            **tally | {"errors": dict(sorted(self._tally.errors.items()))},
            kv_bytes_per_token=self._kv_bytes_per_token,
            peak_kv_bytes=self._peak.tokens * self._kv_bytes_per_token,
            prompt_source=self._renderer.label,
            task=self._job.task,
            has_states=self._has_states,
            num_beams=self._job.num_beams,
        )
        return Plan(self._folder, summary, tuple(units))

    def _wanted(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if self._again is None:
            return batch
        return batch.filter(pa.array(np.isin(row_numbers(batch), self._again.rows // self._samples.num)))

    def _ids(self) -> UniqueIds | None:
        # Of some of the rows nothing is to be proved: all of them were seen before.
        if self._id_column is None or self._again is not None:
            return None
        folder = self._scratch / "ids"
        folder.mkdir()
        return UniqueIds(self._id_column, folder)

    def _keep(self, rendered: Rendered) -> None:
        tally = self._tally
        tally.num_rows += len(self._samples.of(rendered.row_idx))
        failed = [index for index, error in enumerate(rendered.errors) if error is not None]
        good = [index for index, error in enumerate(rendered.errors) if error is None]
        for index in failed:
            error, numbers = rendered.errors[index], self._samples.of(rendered.row_idx[index : index + 1])
            assert error is not None
            tally.errors[error.type] += len(numbers)
            tally.error_examples.setdefault(error.type, error.message)
            self._writer.add_failed(numbers.tolist(), [error] * len(numbers))
        if good:
            token_ids = [rendered.token_ids[index] for index in good]
            self._order.add(rendered.row_idx[good], token_ids, [rendered.params[index] for index in good])
            if tally.sample_row is None:
                tally.sample, tally.sample_row = rendered.sample or "", int(rendered.row_idx[good[0]])

    def _room_behind(self, lengths: NDArray[np.int64], wanted: list[int]) -> NDArray[np.int64]:
        """Tokens behind those of a row, as far as the model's length has room for them."""
        return np.minimum(np.array(wanted, np.int64), np.maximum(self._max_model_len - lengths, 0))

    def _count(
        self, rows: OrderedRows, shared: NDArray[np.int64], output_len: NDArray[np.int64], sizes: list[Size]
    ) -> None:
        tally, lengths = self._tally, rows.lengths
        num_duplicates = np.fromiter(map(len, rows.duplicates), dtype=np.int64, count=len(lengths))
        tally.num_unique += len(lengths)
        tally.num_duplicates += int(num_duplicates.sum())
        tally.prompt_tokens += int(lengths.sum())
        tally.unique_prompt_tokens += int((lengths - shared).sum())
        tally.duplicate_tokens += int((lengths * num_duplicates).sum())
        tally.max_tokens_total += int(output_len.sum())
        longest = int(lengths.argmax())
        if lengths[longest] > tally.longest_prompt:
            tally.longest_prompt, tally.longest_prompt_row = (
                int(lengths[longest]),
                int(rows.row_idx[longest]) // self._samples.num,
            )
        sequence_len = lengths + np.array([size.sequence_len for size in sizes], np.int64)
        # A longer text is computed in windows.
        longest_len = min(int(sequence_len.max()), self._max_model_len)
        tally.longest_len = max(tally.longest_len, longest_len, *(size.beside_len for size in sizes))
        tally.asked_tokens += sum(size.num_asked for size in sizes)


def _ignore(event: object) -> None:
    pass


def _publish(plan: Plan, staging: Path, folder: Path) -> None:
    """Contents first, then the name: after a crash the folder is whole or not there."""
    write_plan(plan, staging)
    shutil.rmtree(folder, ignore_errors=True)
    staging.rename(folder)
    sync_path(folder.parent)


def _at(plan: Plan, folder: Path) -> Plan:
    units = tuple(
        Unit(unit.index, folder / unit.path.name, unit.num_rows, unit.num_tokens, unit.num_input_rows)
        for unit in plan.units
    )
    return Plan(folder, plan.summary, units)
