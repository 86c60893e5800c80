"""A job's plan as it lies on the disk: its numbers, and its units.

Whole or not there: it is written under a temporary name, then renamed.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from batchrun.errors import StorageFailed
from batchrun.plan.units import UNIT_SCHEMA as UNIT_SCHEMA
from batchrun.plan.units import Unit as Unit
from batchrun.plan.units import read_unit as read_unit
from batchrun.store.layout import PLAN_FILE

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """The plan in numbers. `num_rows` = `num_unique` + `num_duplicates` + all `errors`; every sample of a row counts.

    Tokens are counted over the `num_unique` rows that run: `prompt_tokens` without any sharing, and
    `unique_prompt_tokens` with each shared prefix computed once, which is the least possible. `has_states`: the model
    keeps states, and computes every prefix of every row.
    """

    num_rows: int
    num_unique: int
    num_duplicates: int
    errors: dict[str, int]
    error_examples: dict[str, str]  # type → the first such row's message
    prompt_tokens: int
    unique_prompt_tokens: int
    duplicate_tokens: int  # prompt tokens of the rows that were folded
    max_tokens_total: int  # output, at most
    longest_prompt: int  # tokens
    longest_prompt_row: int | None
    longest_len: int  # prompt and output of one row, at most; tokens
    kv_bytes_per_token: int
    peak_kv_bytes: int  # of max_num_seqs neighbours at full length
    prompt_source: str
    sample: str  # the rendered prompt of `sample_row`
    sample_row: int | None
    task: str = "generate"
    asked_tokens: int = 0  # whose probability is wanted
    has_states: bool = False
    num_beams: int = 1

    @property
    def num_errors(self) -> int:
        return sum(self.errors.values())

    @property
    def saved_tokens(self) -> int:
        """Prompt tokens that shared prefixes save."""
        return self.prompt_tokens - self.unique_prompt_tokens

    @property
    def longest_kv_bytes(self) -> int:
        """Keys and values of the longest row at full length: a smaller pool cannot run it."""
        return self.longest_len * self.kv_bytes_per_token


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan on disk."""

    folder: Path
    summary: PlanSummary
    units: tuple[Unit, ...]


def load_plan(folder: Path) -> Plan | None:
    """The plan in `folder`, or None when there is none.

    Raises:
        StorageFailed: there is one that cannot be used.
    """
    path = folder / PLAN_FILE
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["format"] != _FORMAT:
            raise StorageFailed(f"{path} is of another version of batchrun; plan again with --overwrite")
        units = tuple(Unit(**{**unit, "path": folder / unit["path"]}) for unit in stored["units"])
        return Plan(folder, PlanSummary(**stored["summary"]), units)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise StorageFailed(f"cannot read {path} ({error}); plan again with --overwrite") from error


def write_plan(plan: Plan, folder: Path) -> None:
    """Writes what `load_plan` reads beside the units' files, which lie in `folder`, and makes all of it durable."""
    units = [{**asdict(unit), "path": unit.path.name} for unit in plan.units]
    stored = {"format": _FORMAT, "summary": asdict(plan.summary), "units": units}
    (folder / PLAN_FILE).write_text(json.dumps(stored, indent=1), encoding="utf-8")
    for path in (*(unit.path for unit in plan.units), folder / PLAN_FILE, folder):
        sync_path(path)


def sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
