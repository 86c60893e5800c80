"""The pool against a count: every block can be had once; and runs, where there is room for them."""

import random

import pytest

from batchrun.engine.blocks import BlockPool


def grow(pool: BlockPool, table: list[int], num: int) -> None:
    for _ in range(num):
        table.append(pool.allocate(table))
        pool.check()


def release(pool: BlockPool, table: list[int]) -> None:
    for block in reversed(table):
        pool.drop_reference(block)
        pool.check()


def runs_of(table: list[int], run_len: int) -> list[bool]:
    """Of each whole run of a table, whether its blocks are consecutive."""
    starts = range(0, len(table) - run_len + 1, run_len)
    return [table[at : at + run_len] == list(range(table[at], table[at] + run_len)) for at in starts]


@pytest.mark.parametrize("seed", range(20))
def test_every_block_is_had_once_whoever_grows_and_leaves(seed: int) -> None:
    """Tables that grow, share their beginnings and leave, until nothing is free; then all of it is again."""
    rng = random.Random(seed)
    num_blocks, run_len = rng.choice([1, 7, 16, 63]), rng.choice([1, 3, 4, 16])
    pool = BlockPool(num_blocks, run_len)
    tables: list[list[int]] = []
    for _ in range(200):
        if tables and rng.random() < 0.1:
            release(pool, tables.pop(rng.randrange(len(tables))))
        if not tables or rng.random() < 0.1:
            kept = rng.choice(tables)[: rng.randint(0, 9)] if tables else []
            for block in kept:
                pool.add_reference(block)
            tables.append(list(kept))
        grow(pool, rng.choice(tables), min(pool.num_free, rng.randint(1, 5)))
        used = {block for table in tables for block in table}
        assert pool.num_free == num_blocks - len(used)
        assert all(pool.ref_counts[block] == sum(block in table for table in tables) for block in used)
    grow(pool, tables[0], pool.num_free)
    assert pool.num_free == 0
    for table in tables:
        release(pool, table)
    assert pool.num_free == num_blocks


def test_tables_that_grow_by_turns_have_blocks_in_runs() -> None:
    pool = BlockPool(67, run_len=4)
    tables: list[list[int]] = [[] for _ in range(5)]
    for _ in range(2):
        for table in tables:
            grow(pool, table, 6)
        for _ in range(6):
            for table in tables:
                grow(pool, table, 1)
        assert all(runs_of(table, 4) == [True] * 3 for table in tables)
        # In an order that leaves holes for a while.
        for table in tables[::2] + tables[1::2]:
            release(pool, table)
            table.clear()


def test_a_table_that_shares_a_beginning_is_in_runs_from_the_next_one_on() -> None:
    pool = BlockPool(40, run_len=4)
    first: list[int] = []
    grow(pool, first, 12)
    second = first[:5]
    for block in second:
        pool.add_reference(block)
    grow(pool, second, 7)
    assert runs_of(second, 4) == [True, False, True]


def test_what_is_kept_for_one_is_had_by_another_when_nothing_else_is_left() -> None:
    """Two blocks of a run that was begun are not more than two blocks."""
    pool = BlockPool(8, run_len=4)
    first: list[int] = []
    second: list[int] = []
    grow(pool, first, 2)
    grow(pool, second, 6)
    assert (len(set(first + second)), pool.num_free) == (8, 0)
