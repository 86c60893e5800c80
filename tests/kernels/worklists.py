"""Random steps over random prefix trees, and a slow check that a work list covers each of them exactly once."""

import numpy as np
import torch
from numpy.typing import NDArray

from batchrun_kernels.contract import Work
from batchrun_kernels.pieces import Rules
from batchrun_kernels.worklist import KV_HI, KV_LO, OFFSET, Q_LEN, Q_LO, RUNS_HI, SLOT, Worklist


def random_work(random: np.random.Generator, rules: Rules, *, most_sequences: int = 12, most_blocks: int = 12) -> Work:
    """Each sequence keeps some leading blocks of the one before it; entries behind the last block are rubbish.

    Fresh blocks come in fives of consecutive ones.
    """
    num = int(random.integers(1, most_sequences + 1))
    table = np.full((num, most_blocks), -7, np.int32)
    kv_lens = random.integers(1, most_blocks * rules.block_size + 1, num)
    fives = random.permutation(-(-num * most_blocks // 5)).astype(np.int32)
    fresh = iter((5 * fives[:, None] + np.arange(5, dtype=np.int32)).ravel())
    kept, has_chunks = 0, random.random() < 0.6
    for row, kv_len in enumerate(kv_lens):
        num_blocks = -(-int(kv_len) // rules.block_size)
        kept = int(random.integers(0, min(kept, num_blocks) + 1)) if random.random() < 0.8 else min(kept, num_blocks)
        table[row, :kept] = table[row - 1, :kept]
        for block in range(kept, num_blocks):
            table[row, block] = next(fresh)
        kept = num_blocks
    # A neighbour's blocks are the rubbish that matters: they look shared.
    rubbish = np.roll(table, 1 if num % 2 else -1, axis=0)
    table = np.where(np.arange(most_blocks) < -(-kv_lens // rules.block_size)[:, None], table, rubbish)
    longest = np.where(random.random(num) < 0.5, np.minimum(kv_lens, 23), 1) if has_chunks else np.ones(num, np.int64)
    q_lens = random.integers(1, longest + 1)
    lens = tuple(int(q) for q in q_lens), tuple(int(kv) for kv in kv_lens)
    return Work(*lens, torch.from_numpy(table), rules.block_size)


def random_rules(random: np.random.Generator) -> Rules:
    group = int(random.choice([1, 2, 3, 4, 7]))
    narrow = int(random.choice([8, 16]))
    block_size = int(random.choice([1, 4, 5]))
    return Rules(
        group=group,
        block_size=block_size,
        wide_rows=narrow * int(random.choice([1, 2, 4])),
        narrow_rows=narrow,
        wide_piece=int(random.choice([3, 8, 20, 64])),
        narrow_piece=int(random.choice([4, 9, 16])),
        window=None if random.random() < 0.5 else int(random.integers(1, 30)),
        run_len=block_size * int(random.choice([0, 1, 2, 3])),
        shares_prefixes=bool(random.random() < 0.85),
        min_shared_rows=int(random.choice([2, 4, 32])),
        min_shared_len=int(random.choice([1, 4, 16])),
    )


def check(listed: Worklist, work: Work, rules: Rules) -> None:
    """Every row sees each position it may see exactly once, where its own table says; no two results collide."""
    q_lens, kv_lens = np.array(work.q_lens), np.array(work.kv_lens)
    table = work.block_table.numpy()
    sequences = np.repeat(np.arange(len(q_lens)), q_lens)
    starts = np.cumsum(q_lens) - q_lens
    positions = np.arange(len(sequences)) - starts[sequences] + (kv_lens - q_lens)[sequences]
    np.testing.assert_array_equal(listed.positions, positions)
    seen = np.zeros((len(sequences), int(kv_lens.max())), np.int64)
    written = np.zeros(len(sequences), np.int64)
    parts: list[list[int]] = [[] for _ in sequences]
    for kind, most, piece in (
        (listed.wide, rules.wide_rows, rules.wide_piece),
        (listed.narrow, rules.narrow_rows, rules.narrow_piece),
    ):
        assert kind.dtype == np.int32
        assert kind.shape[1] == 7
        lengths = kind[:, KV_HI] - kind[:, KV_LO]
        assert (np.diff(lengths) <= 0).all()
        for item in kind:
            assert 0 < item[Q_LEN] * rules.group <= most
            assert item[KV_LO] < item[KV_HI] <= (item[KV_LO] // piece + 1) * piece
            seen_by_item = np.arange(item[KV_LO], item[KV_HI])
            blocks = listed.block_ids[item[OFFSET] + seen_by_item // rules.block_size]
            assert item[RUNS_HI] == _runs_hi(listed, item, rules)
            for row in range(item[Q_LO], item[Q_LO] + item[Q_LEN]):
                allowed = seen_by_item[_visible(seen_by_item, positions[row], rules)]
                np.add.at(seen[row], allowed, 1)
                owned = table[sequences[row], allowed // rules.block_size]
                np.testing.assert_array_equal(blocks[_visible(seen_by_item, positions[row], rules)], owned)
                if item[SLOT] < 0:
                    written[row] += 1
                else:
                    parts[row].append(int(item[SLOT] + row - item[Q_LO]))
    everything = np.arange(seen.shape[1])
    np.testing.assert_array_equal(seen, [_visible(everything, position, rules) for position in positions])
    _check_results(listed, written, parts)


def _runs_hi(listed: Worklist, item: NDArray[np.int32], rules: Rules) -> int:
    """Tile by tile, block by block."""
    tile, size = rules.run_len, rules.block_size
    if rules.run_blocks == 0:
        return 0
    end = item[KV_LO] // tile * tile
    while end + tile <= item[KV_HI]:
        first = item[OFFSET] + end // size
        blocks = listed.block_ids[first : first + tile // size].tolist()
        if blocks != list(range(blocks[0], blocks[0] + len(blocks))):
            break
        end += tile
    return int(end) if end > item[KV_LO] else 0


def _visible(seen: NDArray[np.int64], position: int, rules: Rules) -> NDArray[np.bool_]:
    visible: NDArray[np.bool_] = seen <= position
    return visible if rules.window is None else visible & (seen > position - rules.window)


def _check_results(listed: Worklist, written: NDArray[np.int64], parts: list[list[int]]) -> None:
    merges = listed.merges
    assert sorted(slot for row in parts for slot in row) == list(range(listed.num_slots))
    assert all((count == 1) == (not slots) and count <= 1 for count, slots in zip(written, parts, strict=True))
    merged = {
        int(token): sorted(merges.slots[start:end].tolist())
        for token, start, end in zip(merges.tokens, merges.starts[:-1], merges.starts[1:], strict=True)
    }
    assert merged == {row: sorted(slots) for row, slots in enumerate(parts) if slots}
