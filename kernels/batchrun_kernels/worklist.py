"""The work list of a step: which rows of q attend to which stretch of keys, in tiles that fit a program.

Decode rows, chunks, pieces of long sequences and shared prefixes are all items of one form; `pieces.py` cuts them.
Owns what is kept from step to step. Knows numpy and the block table; nothing of kernels, layers or devices.

    sequences in order of their prefixes        nodes and leaves                 items
    A  [ p p p p p p ][ a a ]                   node  rows A B C, keys p    ->   wide   A B C x p
    B  [ p p p p p p ][ b ]                     leaf  row A, keys a              narrow A x a, B x b, C x c
    C  [ p p p p p p ][ c c c ]                 leaf  ...                        merge  A: p + a, B: p + b, C: p + c
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from batchrun_kernels.contract import Work
from batchrun_kernels.pieces import Items, Merges, Rules, Segments, Tiles, borders, cut, merges_of, tiles_of
from batchrun_kernels.runs import first_others, runs_hi

Ints = NDArray[np.int64]
Ids = NDArray[np.int32]

# The columns of an item. `OFFSET + p // block_size` is where `block_ids` names the block of position p. Programs work
# in tiles that begin at multiples of their length; from KV_LO's to RUNS_HI all are runs, see `runs.py`.
Q_LO, Q_LEN, OFFSET, KV_LO, KV_HI, SLOT, RUNS_HI = range(7)


@dataclass(frozen=True, slots=True)
class Worklist:
    """One step's items, for all layers of one window.

    An item: rows Q_LO ... Q_LO + Q_LEN of q attend to positions KV_LO ... KV_HI (exclusive), where the causal mask
    and the window allow it. SLOT -1: nobody else attends for these rows, the result is final. Otherwise the result
    is partial and goes to rows SLOT ... SLOT + Q_LEN of the partials. Each list holds its longest items first.
    """

    wide: Ids  # [num_wide, 7]
    narrow: Ids  # [num_narrow, 7], at most Rules.narrow_rows rows x group
    block_ids: Ids  # [num_ids], the sequences' blocks one after another
    positions: Ids  # [num_tokens], of each row of q in its sequence
    merges: Merges
    num_slots: int
    run_len: int  # keys of the tiles that RUNS_HI counts; 0: none


@dataclass(frozen=True, slots=True)
class _Step:
    """What the next step may go on from."""

    q_lens: Ints
    kv_lens: Ints
    table: Ids
    segments: Segments
    tiles: Tiles
    items: Items
    merges: Merges
    others: Ids | None  # see `first_others`; None: nobody asks for runs


class Planner:
    """Plans step after step; where the same sequences decode one more token, only what changed is made anew."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self._last: _Step | None = None

    def plan(self, work: Work) -> Worklist:
        """The table must lie on the host and hold every sequence in an order that brings shared prefixes together.

        Any order is correct: sequences that are not neighbours just do not share.
        """
        assert work.block_size == self.rules.block_size, (work.block_size, self.rules.block_size)
        q_lens, kv_lens = np.array(work.q_lens, np.int64), np.array(work.kv_lens, np.int64)
        table: Ids = work.block_table.numpy()
        assert table.dtype == np.int32, table.dtype
        assert len(table) == len(q_lens) == len(kv_lens), (table.shape, len(q_lens), len(kv_lens))
        assert ((q_lens > 0) & (kv_lens >= q_lens)).all(), (q_lens, kv_lens)
        positions = _positions(q_lens, kv_lens)
        last = self._last
        goes_on = last is not None and _goes_on(last, q_lens, kv_lens, table, self.rules.block_size)
        if last is not None and goes_on:
            segments = replace(last.segments, kv_hi=last.segments.kv_hi + last.segments.is_leaf)
            tiles, before = last.tiles, last.items
        else:
            segments = _segments(q_lens, kv_lens, table, self.rules)
            tiles, before = tiles_of(segments, self.rules), None
        items = cut(segments, tiles, positions, self.rules, before)
        # The same array of slots: the same partials for the same rows.
        is_merged_alike = last is not None and items.slot is last.items.slot
        merges = last.merges if last is not None and is_merged_alike else merges_of(items, tiles)
        others = _others(last if goes_on else None, kv_lens, table, self.rules)
        self._last = _Step(q_lens, kv_lens, table.copy(), segments, tiles, items, merges, others)
        return _worklist(self._last, positions, self.rules)


def _positions(q_lens: Ints, kv_lens: Ints) -> Ints:
    """[num_tokens]."""
    starts = np.cumsum(q_lens) - q_lens
    positions: Ints = np.arange(q_lens.sum()) + np.repeat(kv_lens - q_lens - starts, q_lens)
    return positions


def _goes_on(last: _Step, q_lens: Ints, kv_lens: Ints, table: Ids, block_size: int) -> bool:
    """Whether each sequence of the last step, with one query then and now, is one token longer in the same blocks."""
    if len(q_lens) != len(last.q_lens) or not ((q_lens == 1) & (last.q_lens == 1)).all():
        return False
    if not np.array_equal(kv_lens, last.kv_lens + 1):
        return False
    width = min(table.shape[1], last.table.shape[1])
    sequence, block = np.nonzero(table[:, :width] != last.table[:, :width])
    return bool((block >= -(-last.kv_lens[sequence] // block_size)).all())


def _segments(q_lens: Ints, kv_lens: Ints, table: Ids, rules: Rules) -> Segments:
    """The shared nodes that pay, and for each sequence a leaf with what no node covers; level by level of the tree."""
    num = len(q_lens)
    rows = np.concatenate([[0], np.cumsum(q_lens)])
    shared = _shared_lens(kv_lens - q_lens, table, rules)
    first, end, covered = np.array([0]), np.array([num]), np.array([0])
    found: list[tuple[Ints, Ints, Ints, Ints]] = []
    while len(first):
        leaf = end - first == 1
        found.append((first[leaf], end[leaf], covered[leaf], kv_lens[first[leaf]]))
        first, end, covered = first[~leaf], end[~leaf], covered[~leaf]
        if not len(first):
            break
        depth = np.minimum.reduceat(shared, borders(first, end - 1))[::2]
        seen_from = covered
        if rules.window is not None:
            oldest = np.minimum.reduceat(np.append(kv_lens - q_lens, 0), borders(first, end))[::2]
            seen_from = np.maximum(covered, oldest - rules.window + 1)
        pays = (depth - seen_from >= rules.min_shared_len) & (
            (rows[end] - rows[first]) * rules.group >= rules.min_shared_rows
        )
        found.append((first[pays], end[pays], covered[pays], depth[pays]))
        covered = np.where(pays, depth, covered)
        # Children begin where neighbours share no more than this node.
        gaps = end - 1 - first
        owner = np.repeat(np.arange(len(first)), gaps)
        gap = np.arange(gaps.sum()) - np.repeat(np.cumsum(gaps) - gaps, gaps) + first[owner]
        parting = shared[gap] == depth[owner]
        num_children = np.bincount(owner[parting], minlength=len(first)) + 1
        starts = gap[parting] + 1
        first, end = np.sort(np.concatenate([first, starts])), np.sort(np.concatenate([end, starts]))
        covered = np.repeat(covered, num_children)
    firsts, ends, lo, hi = (np.concatenate(column) for column in zip(*found, strict=True))
    return Segments(firsts, rows[firsts], rows[ends] - rows[firsts], lo, hi, ends - firsts == 1)


def _shared_lens(contexts: Ints, table: Ids, rules: Rules) -> Ints:
    """[num_sequences]: the tokens each sequence shares with the next one, in whole blocks before either's queries.

    The last entry is a sentinel. A leaf is never empty, because its own queries are never shared.
    """
    if not rules.shares_prefixes or len(contexts) < 2:
        return np.zeros(len(contexts), np.int64)
    differ = np.ones((len(table) - 1, table.shape[1] + 1), bool)
    np.not_equal(table[1:], table[:-1], out=differ[:, :-1])
    num_equal = differ.argmax(axis=1)
    most = np.minimum(contexts[1:], contexts[:-1]) // rules.block_size
    return np.append(np.minimum(num_equal, most) * rules.block_size, 0)


def _others(last: _Step | None, kv_lens: Ints, table: Ids, rules: Rules) -> Ids | None:
    """What `first_others` finds; going on from `last`, only sequences that have entered a block are looked at."""
    if rules.run_blocks == 0:
        return None
    if last is None or last.others is None or last.others.shape[1] != table.shape[1] // rules.run_blocks + 1:
        return first_others(table, rules.run_blocks)
    entered = np.flatnonzero(kv_lens % rules.block_size == 1 % rules.block_size)
    others = last.others.copy()
    others[entered] = first_others(table[entered], rules.run_blocks)
    return others


def _worklist(step: _Step, positions: Ints, rules: Rules) -> Worklist:
    items, tiles, table = step.items, step.tiles, step.table
    num_blocks = -(-step.kv_lens // rules.block_size)
    offsets = np.cumsum(num_blocks) - num_blocks
    longest_first = np.argsort(items.kv_lo - items.kv_hi, kind="stable")
    tile = items.tile[longest_first]
    sequence = step.segments.sequence[tiles.segment[tile]]
    kv_lo, kv_hi = items.kv_lo[longest_first], items.kv_hi[longest_first]
    listed = np.empty((len(tile), 7), np.int32)
    listed[:, Q_LO], listed[:, Q_LEN] = tiles.q_lo[tile], tiles.q_len[tile]
    listed[:, OFFSET] = offsets[sequence]
    listed[:, KV_LO], listed[:, KV_HI] = kv_lo, kv_hi
    listed[:, SLOT] = items.slot[longest_first]
    run_len = rules.run_blocks * rules.block_size
    listed[:, RUNS_HI] = 0 if step.others is None else runs_hi(step.others, run_len, sequence, kv_lo, kv_hi)
    is_wide = tiles.is_wide[tile]
    block_ids = table[np.arange(table.shape[1]) < num_blocks[:, None]]
    assert len(block_ids) == num_blocks.sum(), "the table is narrower than a sequence is long"
    return Worklist(
        listed[is_wide],
        listed[~is_wide],
        block_ids,
        positions.astype(np.int32),
        step.merges,
        len(step.merges.slots),
        run_len,
    )
