"""Cuts stretches of work into items: tiles of rows, and pieces of keys at fixed multiples of a length.

A piece's borders depend on its own sequence only, so without shared prefixes a row's result does not depend on
the rows beside it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Ids = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Rules:
    """How a step is cut. Rows are query tokens x `group`, the query heads of one kv head; lengths are tokens."""

    group: int
    block_size: int
    wide_rows: int = 64
    narrow_rows: int = 16
    wide_piece: int = 4096
    narrow_piece: int = 512
    window: int | None = None
    # The length of a tile that is fetched at once where its blocks are consecutive; 0: none is.
    run_len: int = 0
    # A shared prefix is computed once for its sequences from here on; below, each sequence reads it by itself.
    shares_prefixes: bool = True
    min_shared_rows: int = 32
    min_shared_len: int = 256

    def __post_init__(self) -> None:
        assert self.group <= self.narrow_rows <= self.wide_rows, (self.group, self.narrow_rows, self.wide_rows)
        assert min(self.wide_piece, self.narrow_piece) > 0, (self.wide_piece, self.narrow_piece)

    @property
    def run_blocks(self) -> int:
        """Of a tile that is fetched at once; 0 where blocks do not divide it."""
        return 0 if self.run_len % self.block_size else self.run_len // self.block_size


@dataclass(frozen=True, slots=True)
class Segments:
    """Rows of q against a stretch of keys, before cutting; a leaf is one sequence with its last key."""

    sequence: Ints  # [num_segments], the sequence in whose blocks the keys are found
    q_lo: Ints
    q_len: Ints
    kv_lo: Ints
    kv_hi: Ints
    is_leaf: Bools


@dataclass(frozen=True, slots=True)
class Tiles:
    """The rows of the segments, cut into tiles; the same in every step of the same segments."""

    segment: Ints  # [num_tiles], the index of its segment
    q_lo: Ints
    q_len: Ints
    is_wide: Bools
    piece_len: Ints  # keys
    ranges: Ints  # [2 * num_tiles], first row, end, first row ...


@dataclass(frozen=True, slots=True)
class Items:
    """Columns of the items, in the order of their segments, tiles and pieces."""

    tile: Ints  # [num_items], the index of its tile
    piece: Ints  # of those of its tile, from 0
    kv_lo: Ints
    kv_hi: Ints
    slot: Ints  # -1: final
    num_pieces: Ints  # [num_tiles]


@dataclass(frozen=True, slots=True)
class Merges:
    """Which partials make up which row: row `tokens[i]` of the output is `slots[starts[i] : starts[i + 1]]`, merged."""

    tokens: Ids  # [num_merged]
    starts: Ids  # [num_merged + 1]
    slots: Ids  # [num_slots], a permutation of all slots


def balanced_piece(kv_lens: tuple[int, ...], kv_heads: int, num_programs: int) -> int:
    """The piece length that gives each of `num_programs` about as much: a multiple of 64, at least 256.

    It depends on the batch: use it where results need not be the same whatever runs beside.
    """
    share = -(-sum(kv_lens) * kv_heads // num_programs)
    return max(256, -(-share // 64) * 64)


def tiles_of(segments: Segments, rules: Rules) -> Tiles:
    """Few rows stay together in a narrow tile; others are cut into wide ones, of which the last may be narrow."""
    is_narrow = segments.q_len * rules.group <= rules.narrow_rows
    tile_len = rules.wide_rows // rules.group
    of, number = _expand(np.where(is_narrow, 1, -(-segments.q_len // tile_len)))
    q_lo = segments.q_lo[of] + number * tile_len
    q_len = np.minimum(tile_len, segments.q_lo[of] + segments.q_len[of] - q_lo)
    q_len = np.where(is_narrow[of], segments.q_len[of], q_len)
    is_wide = q_len * rules.group > rules.narrow_rows
    piece_len = np.where(is_wide, rules.wide_piece, rules.narrow_piece)
    return Tiles(of, q_lo, q_len, is_wide, piece_len, borders(q_lo, q_lo + q_len))


def cut(
    segments: Segments,
    tiles: Tiles,
    positions: Ints,  # [num_tokens]
    rules: Rules,
    last: Items | None = None,
) -> Items:
    """Every (row, position it may see) of the segments, once; what the masks hide from a whole tile is left out.

    `last` are the items of the same tiles in the step before: where they are as many, only their borders move.
    """
    bounded = np.append(positions, 0)
    kv_hi = np.minimum(segments.kv_hi[tiles.segment], np.maximum.reduceat(bounded, tiles.ranges)[::2] + 1)
    kv_lo = segments.kv_lo[tiles.segment]
    if rules.window is not None:
        kv_lo = np.maximum(kv_lo, np.minimum.reduceat(bounded, tiles.ranges)[::2] - rules.window + 1)
    first = kv_lo // tiles.piece_len
    num_pieces = np.where(kv_hi > kv_lo, (kv_hi - 1) // tiles.piece_len - first + 1, 0)
    if last is not None and np.array_equal(num_pieces, last.num_pieces):
        tile, piece, slot = last.tile, last.piece, last.slot
    else:
        tile, piece = _expand(num_pieces)
        slot = _slots(tiles.q_lo[tile], tiles.q_len[tile], len(positions))
    length = tiles.piece_len[tile]
    start = (first[tile] + piece) * length
    return Items(
        tile=tile,
        piece=piece,
        kv_lo=np.maximum(kv_lo[tile], start),
        kv_hi=np.minimum(kv_hi[tile], start + length),
        slot=slot,
        num_pieces=num_pieces,
    )


def merges_of(items: Items, tiles: Tiles) -> Merges:
    """In each row, the partials in the order of the items."""
    partial = items.tile[items.slot >= 0]
    of, number = _expand(tiles.q_len[partial])
    rows = tiles.q_lo[partial][of] + number
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    begins = np.flatnonzero(np.diff(ordered, prepend=-1))
    starts = np.append(begins, len(rows))
    return Merges(ordered[begins].astype(np.int32), starts.astype(np.int32), order.astype(np.int32))


def borders(begins: Ints, ends: Ints) -> Ints:
    """begin, end, begin, end ...: every second result of `reduceat` is then that of a range."""
    both = np.empty(2 * len(begins), np.int64)
    both[::2], both[1::2] = begins, ends
    return both


def _expand(counts: Ints) -> tuple[Ints, Ints]:
    """For counts 2, 0, 3: (0 0 2 2 2, 0 1 0 1 2)."""
    of = np.repeat(np.arange(len(counts)), counts)
    return of, np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)


def _slots(q_lo: Ints, q_len: Ints, num_tokens: int) -> Ints:
    """[num_items]: where no row of an item has another item, -1; otherwise slots one after another, in item order."""
    changes = np.bincount(q_lo, minlength=num_tokens + 1) - np.bincount(q_lo + q_len, minlength=num_tokens + 1)
    num_items = np.cumsum(changes)
    most = np.maximum.reduceat(num_items, borders(q_lo, q_lo + q_len))[::2]
    room = np.where(most > 1, q_len, 0)
    return np.where(most > 1, np.cumsum(room) - room, -1)
