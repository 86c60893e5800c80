"""A row's own sampling parameters: from a cell to checked overrides, and from those to `SamplingParams`.

Overrides travel as canonical JSON of what differs from the job's, so that equal rows compare equal; null: nothing.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from batchrun.engine.grammar import CONSTRAINT_NAMES, Constraint
from batchrun.engine.request import SamplingParams
from batchrun.job import Job
from batchrun.nearest import nearest
from batchrun.plan.cells import is_text
from batchrun.settings import plain_reason

PARAM_NAMES = tuple(field.name for field in fields(SamplingParams))
_NO_CONSTRAINT: dict[str, Any] = {name: getattr(SamplingParams(), name) for name in CONSTRAINT_NAMES}


class ParamsReader:
    """Checks the cells of a parameters column: the names, types and limits are those of the job's own options."""

    def __init__(
        self,
        base: SamplingParams,
        always: Mapping[str, Any] | None = None,
        check: Callable[[Constraint], object] | None = None,
        vocab_size: int | None = None,
        *,
        has_beams: bool = False,
    ) -> None:
        """`always` are parameters of every row, whatever its cell says. `check` raises ValueError for a constraint
        that cannot be enforced; see `overrides`. Tokens must be of the vocabulary, if its size is known. With
        `has_beams` nothing is allowed that a search with beams cannot heed."""
        self._base = base
        self._always = overriding(always or {})
        self._check = check
        self._vocab_size = vocab_size
        self._has_beams = has_beams
        # The job's fields themselves, so that a limit is stated once.
        options: dict[str, Any] = {name: (field.annotation, field) for name, field in _options().items()}
        self._model: type[BaseModel] = create_model(
            "RowParams", __config__=ConfigDict(extra="forbid", allow_inf_nan=False), **options
        )

    def overrides(self, cell: object) -> str | None:
        """The canonical JSON of what the cell changes, or None when it changes nothing.

        A cell is a mapping, pairs (a map column) or JSON text; null values in it count as not given.

        Raises:
            ValueError: the reason, for the row's `invalid_params`.
        """
        own = {key: value for key, value in _mapping(cell).items() if value is not None}
        given = overriding(own) | self._always
        for key in given:
            if key not in PARAM_NAMES:
                close = nearest(str(key), PARAM_NAMES)
                raise ValueError(f"unknown key {key!r}; " + (f"did you mean {close!r}?" if close else _known()))
        try:
            checked = self._model.model_validate(given)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise ValueError(f"{first['loc'][0]} {plain_reason(first)}") from None
        changed = {key: getattr(checked, key) for key in sorted(given)}
        changed = {key: value for key, value in changed.items() if value != getattr(self._base, key)}
        text = json.dumps(changed, separators=(",", ":")) if changed else None
        params = merged(self._base, text)
        _check_together(params)
        if self._has_beams:
            check_beams(params)
        if self._vocab_size is not None:
            check_token_ids(params, self._vocab_size)
        if params.constraint is not None and params.constraint != self._base.constraint and self._check is not None:
            self._check(params.constraint)
        return text


def overriding(given: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters that replace others; a constraint among them takes the place of any other one."""
    return {**(_NO_CONSTRAINT if any(name in given for name in CONSTRAINT_NAMES) else {}), **given}


def merged(base: SamplingParams, params: str | None) -> SamplingParams:
    """The job's parameters with a row's overrides, as `ParamsReader.overrides` wrote them."""
    if params is None:
        return base
    changed: dict[str, Any] = {key: _frozen(value) for key, value in json.loads(params).items()}
    return replace(base, **changed)


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Raises ValueError for a token that the model does not have."""
    for name, ids in (
        ("logit_bias", [token for token, _ in params.logit_bias]),
        ("stop_token_ids", params.stop_token_ids),
    ):
        for token in ids:
            if not 0 <= token < vocab_size:
                raise ValueError(f"{name} names the token {token:,}; the model has those from 0 to {vocab_size - 1:,}")


def check_beams(params: SamplingParams) -> None:
    """Raises ValueError for what a search with beams cannot heed."""
    if names := params.unheeded_by_beams:
        raise ValueError(f"{' and '.join(names)} cannot go with num_beams, which finds the likeliest text")


def _frozen(value: Any) -> Any:
    """JSON has lists where the parameters have tuples."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def can_hold_params(kind: pa.DataType) -> bool:
    """Whether a column of this type can hold parameters: struct, map or JSON text."""
    return bool(pa.types.is_struct(kind) or pa.types.is_map(kind)) or is_text(kind)


def _options() -> dict[str, Any]:
    return {name: Job.model_fields[name] for name in PARAM_NAMES}


def _mapping(cell: object) -> Mapping[Any, Any]:
    if cell is None or cell == "":
        return {}
    if isinstance(cell, str):
        try:
            cell = json.loads(cell)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not JSON ({error})") from None
    if isinstance(cell, list) and all(isinstance(pair, tuple) for pair in cell):
        cell = dict(cell)
    if cell is None:
        return {}
    if not isinstance(cell, Mapping):
        raise ValueError(f"should be an object with parameters such as max_tokens, not {type(cell).__name__}")
    return cell


def _check_together(params: SamplingParams) -> None:
    if params.min_tokens > params.max_tokens:
        raise ValueError(f"min_tokens {params.min_tokens} is more than max_tokens {params.max_tokens}")
    if "" in params.stop:
        raise ValueError("stop holds an empty text")
    if any(not word.strip() for word in params.bad_words):
        raise ValueError("bad_words holds a blank text")
    if params.repetition_min_count == 1:
        raise ValueError("repetition_min_count 1 would end every answer at once; 2 is the least")
    names = params.constraint_names
    if len(names) > 1:
        raise ValueError(f"{' and '.join(names)} exclude each other")
    if names and params.ignore_eos:
        raise ValueError(f"ignore_eos cannot go with {names[0]}, which says where a text ends")


def _known() -> str:
    return f"there are {', '.join(PARAM_NAMES)}"
