"""Runs: stretches of keys whose blocks are consecutive, so that a kernel can fetch a whole tile of them at once.

Only tiles that begin at multiples of their length count: every item that reads a position reads it in the same tile.
"""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Ids = NDArray[np.int32]


def first_others(
    table: Ids,  # [num_sequences, max_blocks]
    run_blocks: int,
) -> Ids:
    """[num_sequences, num_tiles + 1]: from each tile of the table on, the first that is no run; at the latest the end.

    What a table holds behind a sequence's last block may count as runs.
    """
    num_tiles = table.shape[1] // run_blocks
    is_run = np.ones((len(table), num_tiles), bool)
    if run_blocks > 1:
        goes_on = table[:, 1:] - table[:, :-1] == 1
        for at in range(run_blocks - 1):
            is_run &= goes_on[:, at::run_blocks][:, :num_tiles]
    others = np.full((len(table), num_tiles + 1), num_tiles, np.int32)
    np.copyto(others[:, :-1], np.arange(num_tiles, dtype=np.int32), where=~is_run)
    first: Ids = np.minimum.accumulate(others[:, ::-1], axis=1)[:, ::-1]
    return first


def runs_hi(
    others: Ids,  # [num_sequences, num_tiles + 1], see `first_others`
    tile_len: int,
    sequence: Ints,  # [num_items]
    kv_lo: Ints,
    kv_hi: Ints,
) -> Ids:
    """[num_items]: from the tile of `kv_lo` to here, exclusive, all tiles are runs that end at `kv_hi` at most.

    A multiple of `tile_len`; 0 where the first tile is none.
    """
    end = np.minimum(others[sequence, kv_lo // tile_len], kv_hi // tile_len) * tile_len
    found: Ids = np.where(end > kv_lo, end, 0).astype(np.int32)
    return found
