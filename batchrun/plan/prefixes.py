"""Which prefixes the rows of a plan share: found in the plan's order, where rows that share stand together.

Knows numbers of rows and tokens; the text of a prefix is whoever's who can decode it.
"""

import heapq
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from batchrun.plan.units import Unit, read_unit

PREFIXES_FILE = "prefixes.json"
_MOST = 120
_HEAD_TOKENS, _TAIL_TOKENS = 96, 32
_TEXT_CHARS = 400


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Tokens `parent_len` to `length` of the prompts of `num_rows` neighbours, the first of which is at `first`.

    `parent_len` is how many tokens are shared with more rows still; `level` is how many such prefixes lie before.
    `text` is what the tokens say, its middle left out when it is long.
    """

    first: int
    num_rows: int
    parent_len: int
    length: int
    level: int
    text: str = ""

    @property
    def saved_tokens(self) -> int:
        """Prompt tokens that need not be computed because of these."""
        return (self.num_rows - 1) * (self.length - self.parent_len)


def shared_prefixes(keep_len: NDArray[np.int32], most: int = _MOST) -> list[SharedPrefix]:
    """The `most` prefixes that save most with all that lies below them, in the plan's order, the outer ones first.

    `keep_len` [num_rows] is how many tokens each row shares with the next. The cost is what is looked at for the ones
    that are returned, not the number of all there are.
    """
    num_rows = len(keep_len)
    shared = keep_len.astype(np.int64)
    before = np.concatenate([[0], np.cumsum(shared)])
    found: list[SharedPrefix] = []
    # What is below a stretch of rows saves this much at most: (negative, first row, end, shared with more rows, level).
    waiting = [(0, 0, num_rows, 0, 0)] if num_rows > 1 else []
    while waiting and len(found) < most:
        _, first, end, parent_len, level = heapq.heappop(waiting)
        inner = shared[first : end - 1]
        length = int(inner.min())
        if length > parent_len:
            found.append(SharedPrefix(first, end - first, parent_len, length, level))
            level += 1
        borders = first + 1 + np.flatnonzero(inner == length)
        starts, ends = np.concatenate([[first], borders]), np.concatenate([borders, [end]])
        saved = before[ends - 1] - before[starts] - (ends - starts - 1) * length
        best = np.argsort(-saved, kind="stable")[:most]
        for at in best[saved[best] > 0].tolist():
            heapq.heappush(waiting, (-int(saved[at]), int(starts[at]), int(ends[at]), length, level))
    return sorted(found, key=lambda prefix: (prefix.first, prefix.level))


def write_prefixes(folder: Path, units: Sequence[Unit], decode: Callable[[Sequence[int]], str]) -> None:
    """Finds the prefixes of these units and writes them with their texts into `folder`."""
    tables = [read_unit(unit) for unit in units if unit.num_tokens]
    keep_len = np.concatenate([np.empty(0, np.int32), *(table.column("keep_len").to_numpy() for table in tables)])
    starts = np.cumsum([0, *(table.num_rows for table in tables)])

    def token_ids(row: int) -> list[int]:
        unit = int(np.searchsorted(starts, row, side="right")) - 1
        return list(tables[unit].column("token_ids")[row - int(starts[unit])].values.to_pylist())

    named = [_named(prefix, token_ids(prefix.first), decode) for prefix in shared_prefixes(keep_len)]
    (folder / PREFIXES_FILE).write_text(json.dumps([asdict(prefix) for prefix in named]), encoding="utf-8")


def read_prefixes(folder: Path) -> list[SharedPrefix]:
    """What `write_prefixes` wrote; none where nothing readable is."""
    try:
        content = json.loads((folder / PREFIXES_FILE).read_text(encoding="utf-8"))
        return [SharedPrefix(**each) for each in content]
    except (OSError, ValueError, TypeError):
        return []


def _named(prefix: SharedPrefix, token_ids: list[int], decode: Callable[[Sequence[int]], str]) -> SharedPrefix:
    tokens = token_ids[prefix.parent_len : prefix.length]
    if len(tokens) <= _HEAD_TOKENS + _TAIL_TOKENS:
        text = decode(tokens)
    else:
        text = f"{decode(tokens[:_HEAD_TOKENS])} … {decode(tokens[-_TAIL_TOKENS:])}"
    return replace(prefix, text="".join(_middle_left_out(text)))


def _middle_left_out(text: str) -> Iterator[str]:
    if len(text) <= _TEXT_CHARS:
        yield text
    else:
        yield from (text[: _TEXT_CHARS * 3 // 4], " … ", text[-_TEXT_CHARS // 4 :])
