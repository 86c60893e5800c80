"""A plan in which some rows are to be run in another way: taken out of their units, and put into units of their own.

Untouched units keep their files. Knows nothing of answers or of how rows are rendered.
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchrun.errors import StorageFailed
from batchrun.plan.members import members, num_members, subset
from batchrun.plan.plan import Plan, PlanSummary, Unit, read_unit, write_plan
from batchrun.plan.units import unit_name, write_unit


def replace_rows(plan: Plan, rows: NDArray[np.int64], fresh: Plan, folder: Path) -> Plan:
    """Writes to `folder`, which exists and is empty, `plan` with `rows` as `fresh`, a plan of just these, has them.

    Both plans stay as they are. The new units' numbers are new too: no part that was ever written has them.

    Raises:
        StorageFailed: a unit cannot be read, or the plan not be written.
    """
    try:
        units, before, after = [], _Figures(), _Figures()
        for unit in plan.units:
            table = read_unit(unit)
            path = folder / unit_name(unit.index)
            if not np.isin(members(table).rows, rows).any():
                path.hardlink_to(unit.path)
                units.append(replace(unit, path=path))
                continue
            left = subset(table, np.setdiff1d(members(table).rows, rows))
            before.add(table)
            after.add(left)
            if len(left):
                units.append(write_unit(left, unit.index, path))
        units += _appended(fresh, 1 + max((unit.index for unit in plan.units), default=-1), folder)
        replaced = Plan(folder, _summary(plan.summary, before, after, fresh.summary), tuple(units))
        write_plan(replaced, folder)
    except OSError as error:
        raise StorageFailed(f"cannot write the plan {folder}: {error.strerror or error}") from error
    return replaced


def keep_rows(plan: Plan, rows: NDArray[np.int64], folder: Path) -> Plan:
    """Writes to `folder`, which exists and is empty, the part of `plan` that answers `rows`.

    Raises:
        StorageFailed: a unit cannot be read, or the plan not be written.
    """
    try:
        units, whole, kept = [], _Figures(), _Figures()
        for unit in plan.units:
            table = read_unit(unit)
            left = subset(table, rows)
            whole.add(table)
            kept.add(left)
            if len(left):
                units.append(write_unit(left, unit.index, folder / unit_name(unit.index)))
        summary = _summary(plan.summary, whole, kept, None)
        smaller = Plan(folder, replace(summary, num_rows=sum(unit.num_input_rows for unit in units)), tuple(units))
        write_plan(smaller, folder)
    except OSError as error:
        raise StorageFailed(f"cannot write the plan {folder}: {error.strerror or error}") from error
    return smaller


def _appended(fresh: Plan, first: int, folder: Path) -> list[Unit]:
    """The fresh units under their new numbers."""
    appended = []
    for index, unit in enumerate(fresh.units, first):
        path = folder / unit_name(index)
        path.hardlink_to(unit.path)
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


def _summary(old: PlanSummary, before: _Figures, after: _Figures, fresh: PlanSummary | None) -> PlanSummary:
    """The old figures without those of `before`, with those of `after` and of the fresh plan; limits are the larger."""
    errors = Counter(old.errors)
    errors.subtract(before.errors)
    errors.update(after.errors)
    prompt_tokens = old.prompt_tokens + after.prompt_tokens - before.prompt_tokens
    saved = old.saved_tokens + after.shared_tokens - before.shared_tokens
    left = replace(
        old,
        num_unique=old.num_unique + after.num_unique - before.num_unique,
        num_duplicates=old.num_duplicates + after.num_duplicates - before.num_duplicates,
        errors={name: count for name, count in sorted(errors.items()) if count},
        prompt_tokens=prompt_tokens,
        unique_prompt_tokens=prompt_tokens - saved,
        duplicate_tokens=old.duplicate_tokens + after.duplicate_tokens - before.duplicate_tokens,
    )
    return left if fresh is None else _joined(left, fresh)


def _joined(left: PlanSummary, fresh: PlanSummary) -> PlanSummary:
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
