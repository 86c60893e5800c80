"""The order in which rows run: depth-first over the tree of their prefixes, that is, sorted by tokens.

Owns how rows are written as sortable records, how much neighbours share, and the folding of equal rows. Knows nothing
of text, files of units or engines. Sorts beyond memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from batchrun.plan.runs import ExternalSort

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchrun.engine.request import TokenIds

_BIG_ENDIAN = np.dtype(">u4")
# A record is made of big-endian words, so that bytes compare as tokens do:
#   token + 1, …  |  0  |  params as UTF-8, padded with NUL  |  row_idx, two words  |  number of tokens
# The unique row_idx ends every comparison; no token is 0, so a prefix sorts before what extends it.
_TRAILER_WORDS = 3
_SEPARATOR_WORDS = 1
_MAX_COMPARED = 1024
_COMPARED = 16
_BATCH_WORDS = 1 << 20


@dataclass(frozen=True, slots=True)
class OrderedRows:
    """Rows in plan order; row i's tokens are `tokens[offsets[i] : offsets[i + 1]]`.

    `keep_len[i]` is how many tokens row i shares with the row after it, which may be in the next batch.
    `duplicates[i]` are the other rows with the same tokens and parameters, ascending.
    """

    row_idx: NDArray[np.int64]  # [num_rows]
    tokens: "TokenIds"  # [num_tokens]
    offsets: NDArray[np.int64]  # [num_rows + 1]
    keep_len: NDArray[np.int32]  # [num_rows]
    params: list[str | None]
    duplicates: list[NDArray[np.int64]]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Prompt tokens of each row."""
        return np.diff(self.offsets)


class Order:
    """Takes rows in input order and gives them back in plan order."""

    def __init__(self, folder: Path, memory_bytes: int = 256 << 20, slice_bytes: int = 256 << 10) -> None:
        """Sorted runs go to `folder`, which exists; memory is as for `ExternalSort`."""
        self._sort = ExternalSort(folder, memory_bytes, slice_bytes)

    def add(self, row_idx: NDArray[np.int64], token_ids: "list[TokenIds]", params: list[str | None]) -> None:
        """Rows with at least one token each, in three lists of one length."""
        for start, end in _cuts(list(map(len, token_ids))):
            self._sort.add(encode(row_idx[start:end], token_ids[start:end], params[start:end]))

    def sorted(self, is_foldable: "Callable[[str | None], bool]") -> Iterator[OrderedRows]:
        """All rows by tokens, then parameters, then number, in batches of up to a few MiB.

        Equal rows are folded into the first of them where `is_foldable` says so of their parameters.
        """
        held = _Held(b"", [])
        for records in self._sort.drain():
            for start, end in _cuts([len(record) // 4 for record in records]):
                part = records[start:end]
                rows = _decode([held.record, *part] if held.record else part)
                groups = _fold(rows, held.duplicates, is_foldable)
                # The last group waits: the next record may belong to it, and decides what it shares.
                last = int(groups.first[-1])
                record = held.record if held.record and last == 0 else part[last - bool(held.record)]
                held = _Held(record, groups.duplicates[-1])
                if len(groups.first) > 1:
                    yield _ordered(rows, groups)
        if held.record:
            rows = _decode([held.record])
            nothing = np.zeros(1, dtype=np.int32)
            yield _ordered(rows, _Groups(np.zeros(2, dtype=np.int64), nothing, [held.duplicates, []]))


def encode(row_idx: NDArray[np.int64], token_ids: "list[TokenIds]", params: list[str | None]) -> list[bytes]:
    """Rows as records that sort by tokens, then parameters, then number."""
    texts = [_padded(text) for text in params]
    lengths = np.fromiter(map(len, token_ids), dtype=np.int64, count=len(token_ids))
    num_words = lengths + np.fromiter((len(text) // 4 for text in texts), dtype=np.int64, count=len(texts))
    ends = np.cumsum(num_words + _SEPARATOR_WORDS + _TRAILER_WORDS)
    starts = ends - num_words - _SEPARATOR_WORDS - _TRAILER_WORDS
    words = np.zeros(int(ends[-1]), dtype=_BIG_ENDIAN)
    words[_positions(starts, lengths)] = np.concatenate(token_ids).astype(np.uint32) + 1
    words[ends - 3] = row_idx >> 32
    words[ends - 2] = row_idx & 0xFFFFFFFF
    words[ends - 1] = lengths
    for start, length, text in zip(starts.tolist(), lengths.tolist(), texts, strict=True):
        if text:
            first = start + length + _SEPARATOR_WORDS
            words[first : first + len(text) // 4] = np.frombuffer(text, dtype=_BIG_ENDIAN)
    whole = words.tobytes()
    return [whole[4 * start : 4 * end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]


def shared_lengths(tokens: "TokenIds", offsets: NDArray[np.int64]) -> NDArray[np.int32]:
    """How many leading tokens each row shares with the next one; int32 [num_rows - 1].

    Compares growing windows of the pairs that are still equal: the cost is what is shared, not the longest row.
    """
    lengths = np.diff(offsets)
    limit = np.minimum(lengths[:-1], lengths[1:])
    shared = np.zeros(len(limit), dtype=np.int64)
    active = np.flatnonzero(limit)
    width = _COMPARED
    while len(active):
        unequal = []
        # Slices keep the windows small when many pairs share much.
        for pairs in np.array_split(active, 1 + len(active) * width // _BATCH_WORDS):
            position = shared[pairs, None] + np.arange(width)  # [num_pairs, width]
            is_inside = position < limit[pairs, None]
            position[~is_inside] = 0
            first, second = offsets[pairs, None], offsets[pairs + 1, None]
            is_equal = (tokens[first + position] == tokens[second + position]) & is_inside
            run = np.where(is_equal.all(axis=1), width, is_equal.argmin(axis=1))
            shared[pairs] += run
            unequal.append(run < width)
        active = active[~np.concatenate(unequal)]
        width = min(2 * width, _MAX_COMPARED)
    return shared.astype(np.int32)


@dataclass(frozen=True, slots=True)
class _Held:
    """The first record of the last group, and the numbers of its duplicates so far, in pieces."""

    record: bytes
    duplicates: list[NDArray[np.int64]]


@dataclass(frozen=True, slots=True)
class _Rows:
    """Decoded records."""

    row_idx: NDArray[np.int64]  # [num_rows]
    tokens: "TokenIds"
    offsets: NDArray[np.int64]  # [num_rows + 1]
    params: list[str | None]


@dataclass(frozen=True, slots=True)
class _Groups:
    """Equal rows: each group's first row, what the group shares with the next one, and its duplicates in pieces."""

    first: NDArray[np.int64]  # [num_groups]
    keep_len: NDArray[np.int32]  # [num_groups - 1]
    duplicates: list[list[NDArray[np.int64]]]


def _padded(params: str | None) -> bytes:
    raw = b"" if params is None else params.encode()
    return raw + b"\0" * (-len(raw) % 4)


def _positions(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """`starts[0] … starts[0] + lengths[0]`, `starts[1] …`, one after the other."""
    before = np.cumsum(lengths) - lengths
    positions: NDArray[np.int64] = np.arange(int(lengths.sum())) + np.repeat(starts - before, lengths)
    return positions


def _cuts(num_words: list[int]) -> Iterator[tuple[int, int]]:
    """Consecutive slices of rows with about a batch's words, at least one row each."""
    start = size = 0
    for index, words in enumerate(num_words):
        if size and size + words > _BATCH_WORDS:
            yield start, index
            start, size = index, 0
        size += words
    if start < len(num_words):
        yield start, len(num_words)


def _decode(records: list[bytes]) -> _Rows:
    words = np.frombuffer(b"".join(records), dtype=_BIG_ENDIAN)
    num_words = np.fromiter(map(len, records), dtype=np.int64, count=len(records)) // 4
    ends = np.cumsum(num_words)
    starts = ends - num_words
    lengths = words[ends - 1].astype(np.int64)
    row_idx = (words[ends - 3].astype(np.int64) << 32) + words[ends - 2]
    tokens = words[_positions(starts, lengths)].astype(np.int32) - 1
    params: list[str | None] = [None] * len(records)
    for index in np.flatnonzero(num_words > lengths + _SEPARATOR_WORDS + _TRAILER_WORDS).tolist():
        text = words[starts[index] + lengths[index] + _SEPARATOR_WORDS : ends[index] - _TRAILER_WORDS].tobytes()
        params[index] = text.rstrip(b"\0").decode()
    return _Rows(row_idx, tokens, np.concatenate(([0], np.cumsum(lengths))), params)


def _fold(rows: _Rows, held: list[NDArray[np.int64]], is_foldable: "Callable[[str | None], bool]") -> _Groups:
    """The groups of equal rows; `held` are duplicates of the first row from before."""
    num_rows = len(rows.row_idx)
    shared = shared_lengths(rows.tokens, rows.offsets)
    lengths = np.diff(rows.offsets)
    has_same_tokens = (shared == lengths[:-1]) & (lengths[:-1] == lengths[1:])
    is_folded = np.zeros(num_rows, dtype=np.bool_)
    for index in np.flatnonzero(has_same_tokens).tolist():
        params = rows.params[index]
        is_folded[index + 1] = params == rows.params[index + 1] and is_foldable(params)
    first = np.flatnonzero(~is_folded)
    ends = np.append(first[1:], num_rows)
    pieces = [rows.row_idx[start + 1 : end] for start, end in zip(first.tolist(), ends.tolist(), strict=True)]
    duplicates = [[piece] if len(piece) else [] for piece in pieces]
    duplicates[0] = held + duplicates[0]
    return _Groups(first, shared[ends[:-1] - 1], duplicates)


def _ordered(rows: _Rows, groups: _Groups) -> OrderedRows:
    """All groups but the last."""
    first = groups.first[:-1]
    lengths = np.diff(rows.offsets)[first]
    none = np.empty(0, dtype=np.int64)
    return OrderedRows(
        row_idx=rows.row_idx[first],
        tokens=rows.tokens[_positions(rows.offsets[first], lengths)],
        offsets=np.concatenate(([0], np.cumsum(lengths))),
        keep_len=groups.keep_len,
        params=[rows.params[index] for index in first.tolist()],
        duplicates=[np.concatenate(pieces) if pieces else none for pieces in groups.duplicates[:-1]],
    )
