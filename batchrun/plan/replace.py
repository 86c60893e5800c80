"""A plan in which some rows are to be run in another way: taken out of their units, and put into units of their own.

Untouched units keep their files. Knows nothing of answers or of how rows are rendered.
"""

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchrun.errors import StorageFailed
from batchrun.plan.members import members, num_members, subset
from batchrun.plan.plan import Plan, PlanSummary, Unit, read_unit, write_plan
from batchrun.plan.prefixes import write_prefixes
from batchrun.plan.units import unit_name, write_unit


def replace_rows(
    plan: Plan, rows: NDArray[np.int64], fresh: Plan, folder: Path, decode: Callable[[Sequence[int]], str]
) -> Plan:
    """Writes to `folder`, which exists and is empty, `plan` with `rows` as `fresh`, a plan of just these, has them.

    Both plans stay as they are. The new units' numbers are new too: no part that was ever written has them. `decode`
    is the tokenizer's, for the texts of shared prefixes.

    Raises:
        StorageFailed: a unit cannot be read, or the plan not be written.
    """
    with _writing(folder):
        left = _Left(plan, folder, lambda own: ~np.isin(own, rows))
        units = left.units + _appended(fresh, 1 + max((unit.index for unit in plan.units), default=-1), folder)
        write_prefixes(folder, units, decode)
        replaced = Plan(folder, _joined(left.summary, fresh.summary), tuple(units))
        write_plan(replaced, folder)
    return replaced


def keep_rows(plan: Plan, rows: NDArray[np.int64], folder: Path) -> Plan:
    """Writes to `folder`, which exists and is empty, the part of `plan` that answers `rows`.

    Raises:
        StorageFailed: a unit cannot be read, or the plan not be written.
    """
    with _writing(folder):
        left = _Left(plan, folder, lambda own: np.isin(own, rows))
        num_rows = sum(unit.num_input_rows for unit in left.units)
        smaller = Plan(folder, replace(left.summary, num_rows=num_rows), tuple(left.units))
        write_plan(smaller, folder)
    return smaller


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageFailed(f"cannot write the plan {folder}: {error.strerror or error}") from error


class _Left:
    """The units of a plan, in `folder`, with the rows that are kept only; untouched ones are the same files."""

    def __init__(self, plan: Plan, folder: Path, is_kept: Callable[[NDArray[np.int64]], NDArray[np.bool_]]) -> None:
        """`is_kept` says of rows of the input which are. Raises OSError and StorageFailed."""
        self.units: list[Unit] = []
        self._folder = folder
        self._before, self._after = _Figures(), _Figures()
        # The last unit that has rows left: written when it is known what its last row shares with the next that is.
        self._open: tuple[Unit, pa.Table, pa.Table] | None = None
        for unit in plan.units:
            whole = read_unit(unit)
            own = members(whole).rows
            is_left = is_kept(own)
            left = whole if is_left.all() else subset(whole, own[is_left])
            if len(left):
                self._close()
                self._open = unit, whole, left
            else:
                self._before.add(whole)
                self._shorten(int(whole.column("keep_len").to_numpy().min()))
        self._close()
        self.summary = _summary(plan.summary, self._before, self._after)

    def _shorten(self, shared_len: int) -> None:
        """What the last row shares with the next is at most this."""
        if self._open is None:
            return
        unit, whole, left = self._open
        keep_len = left.column("keep_len").to_numpy().copy()
        if keep_len[-1] > shared_len:
            keep_len[-1] = shared_len
            at = left.schema.get_field_index("keep_len")
            self._open = unit, whole, left.set_column(at, left.schema.field(at), pa.array(keep_len))

    def _close(self) -> None:
        if self._open is None:
            return
        unit, whole, left = self._open
        path = self._folder / unit_name(unit.index)
        if left is whole:
            _same_file(unit.path, path)
            self.units.append(replace(unit, path=path))
        else:
            self._before.add(whole)
            self._after.add(left)
            self.units.append(write_unit(left, unit.index, path))


def _same_file(source: Path, target: Path) -> None:
    """A second name; on another disk, or on one without hard links, a copy. Raises OSError."""
    try:
        target.hardlink_to(source)
    except OSError:
        shutil.copyfile(source, target)


def _appended(fresh: Plan, first: int, folder: Path) -> list[Unit]:
    """The fresh units under their new numbers."""
    appended = []
    for index, unit in enumerate(fresh.units, first):
        path = folder / unit_name(index)
        _same_file(unit.path, path)
        appended.append(replace(unit, index=index, path=path))
    return appended


@dataclass(slots=True)
class _Figures:
    """What a summary counts in units; the tokens without those of failed rows, which have none."""

    num_unique: int = 0
    num_duplicates: int = 0
    prompt_tokens: int = 0
    shared_tokens: int = 0
    duplicate_tokens: int = 0
    errors: Counter[str] = field(default_factory=Counter)

    def add(self, unit: pa.Table) -> None:
        errors = [error["type"] for error in unit.column("error").to_pylist() if error is not None]
        self.errors.update(errors)
        if errors:
            return
        lengths = np.diff(unit.column("token_ids").combine_chunks().offsets.to_numpy())
        duplicates = num_members(unit) - 1
        self.num_unique += len(unit)
        self.num_duplicates += int(duplicates.sum())
        self.prompt_tokens += int(lengths.sum())
        self.shared_tokens += int(unit.column("keep_len").to_numpy().sum())
        self.duplicate_tokens += int((lengths * duplicates).sum())


def _summary(old: PlanSummary, before: _Figures, after: _Figures) -> PlanSummary:
    """The old figures without those of `before`, with those of `after`."""
    errors = Counter(old.errors)
    errors.subtract(before.errors)
    errors.update(after.errors)
    prompt_tokens = old.prompt_tokens + after.prompt_tokens - before.prompt_tokens
    saved = old.saved_tokens + after.shared_tokens - before.shared_tokens
    return replace(
        old,
        num_unique=old.num_unique + after.num_unique - before.num_unique,
        num_duplicates=old.num_duplicates + after.num_duplicates - before.num_duplicates,
        errors={name: count for name, count in sorted(errors.items()) if count},
        prompt_tokens=prompt_tokens,
        unique_prompt_tokens=prompt_tokens - saved,
        duplicate_tokens=old.duplicate_tokens + after.duplicate_tokens - before.duplicate_tokens,
    )


def _joined(left: PlanSummary, fresh: PlanSummary) -> PlanSummary:
    """The figures of both; limits are the larger."""
    errors = Counter(left.errors) + Counter(fresh.errors)
    examples = fresh.error_examples | left.error_examples
    longest = left if left.longest_prompt >= fresh.longest_prompt else fresh
    return replace(
        left,
        num_unique=left.num_unique + fresh.num_unique,
        num_duplicates=left.num_duplicates + fresh.num_duplicates,
        errors=dict(sorted(errors.items())),
        error_examples={name: text for name, text in examples.items() if name in errors},
        prompt_tokens=left.prompt_tokens + fresh.prompt_tokens,
        unique_prompt_tokens=left.unique_prompt_tokens + fresh.unique_prompt_tokens,
        duplicate_tokens=left.duplicate_tokens + fresh.duplicate_tokens,
        max_tokens_total=left.max_tokens_total + fresh.max_tokens_total,
        asked_tokens=left.asked_tokens + fresh.asked_tokens,
        longest_prompt=longest.longest_prompt,
        longest_prompt_row=longest.longest_prompt_row,
        longest_len=max(left.longest_len, fresh.longest_len),
        peak_kv_bytes=max(left.peak_kv_bytes, fresh.peak_kv_bytes),
    )
