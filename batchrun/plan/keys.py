"""What an answer depends on in a row: a digest of its tokens, its own parameters and, when it is sampled, its number.

Derived from a plan whenever two plans are compared, and stored nowhere: a plan that is made costs nothing for it. What
all rows of a job have in common (the model, the job's own sampling) is no part of it.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa

_KEY_BYTES = 16
KEY_TYPE = pa.binary(_KEY_BYTES)
_ANY_ROW = -1


@dataclass(frozen=True, slots=True)
class RowKeys:
    """Two keys for each row of a unit, both of `KEY_TYPE`.

    Rows with the same `prompt` key were asked the same, if perhaps with other parameters. Rows with the same `answer`
    key have the same answer: it holds the parameters too, and of a sampled row its number, which its randomness is made
    of.
    """

    prompt: pa.Array  # [num_rows]
    answer: pa.Array  # [num_rows]


def row_keys(unit: pa.Table, is_greedy: Callable[[str | None], bool]) -> RowKeys:
    """The keys of a unit's rows (`UNIT_SCHEMA`); `is_greedy` says it of a row's own parameters."""
    tokens = unit.column("token_ids").combine_chunks()
    ends = (tokens.offsets.to_numpy() * 4).tolist()
    raw = memoryview(tokens.values.to_numpy()).cast("B")
    prompts, answers = [], []
    for at, (row, params) in enumerate(zip(unit.column("row_idx").to_pylist(), _params(unit), strict=True)):
        digest = hashlib.blake2b(raw[ends[at] : ends[at + 1]], digest_size=_KEY_BYTES)
        prompts.append(digest.digest())
        # Behind the two parts the length of the first: where it ends is then part of what is hashed.
        digest.update(f"{params or ''}{ends[at + 1] - ends[at]:016x}".encode())
        answers.append(_finished(digest, _ANY_ROW if is_greedy(params) else row))
    return RowKeys(pa.array(prompts, KEY_TYPE), pa.array(answers, KEY_TYPE))


def _params(unit: pa.Table) -> list[str | None]:
    params: list[str | None] = unit.column("params").to_pylist()
    return params


def _finished(digest: "hashlib.blake2b", row: int) -> bytes:
    whole = digest.copy()
    whole.update(row.to_bytes(8, "little", signed=True))
    return whole.digest()
