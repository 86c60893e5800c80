"""The tree against an oracle: a plain list of the prefixes it was given."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from batchrun.engine.blocks import BlockPool
from batchrun.engine.radix import RadixTree, common_len

BLOCK = 3
prompts = st.lists(st.integers(0, 2), min_size=1, max_size=14)


def ids(tokens):
    return np.array(tokens, dtype=np.int32)


class Rows:
    """Rows that enter a tree whole, hold their blocks, and leave."""

    def __init__(self, num_blocks=60):
        self.pool = BlockPool(num_blocks)
        self.tree = RadixTree(self.pool, BLOCK)

    def enter(self, tokens, *, has_future=True):
        tokens = ids(tokens)
        prefix = self.tree.match(tokens, len(tokens))
        table = [node.block for node in prefix.nodes]
        self.tree.acquire(table)
        node = prefix.nodes[-1] if prefix.nodes else self.tree.root
        for at in range(len(table), len(tokens) // BLOCK):
            if not self.pool.num_free:
                self.tree.evict()
            table.append(self.pool.allocate())
            node = self.tree.insert(node, tokens[at * BLOCK : (at + 1) * BLOCK], table[-1], has_future=has_future)
        self.tree.check()
        return table

    def leave(self, table):
        self.tree.release(table)
        self.tree.check()
        self.pool.check()


@given(st.lists(prompts, max_size=12), prompts, st.integers(0, 14))
@settings(max_examples=300)
def test_match_is_the_longest_common_prefix_with_any_row(rows, probe, limit):
    """Token by token, also inside a block, and never past the limit."""
    world = Rows()
    for row in rows:
        world.leave(world.enter(row))
    whole = [row[: len(row) // BLOCK * BLOCK] for row in rows]
    longest = max([common_len(ids(row), ids(probe)) for row in whole], default=0)
    matched = world.tree.match(ids(probe), limit)
    assert matched.num_tokens(BLOCK) == min(longest, limit, len(probe))


@given(st.lists(st.tuples(prompts, st.integers(0, 5), st.booleans()), max_size=30))
@settings(max_examples=300)
def test_entering_and_leaving_in_any_order_keeps_every_invariant(moves):
    """With a pool so small that rows evict each other's prefixes."""
    world, inside = Rows(num_blocks=16), []
    for tokens, which, has_future in moves:
        if len(inside) > 2:
            world.leave(inside.pop(which % len(inside)))
        inside.append(world.enter(tokens, has_future=has_future))
    for table in inside:
        world.leave(table)
    world.tree.clear()
    world.tree.check()
    assert world.pool.num_free == 16


def test_eviction_takes_the_least_recently_used_leaf_first():
    world = Rows(num_blocks=4)
    world.leave(world.enter([0, 0, 0, 1, 1, 1]))
    world.leave(world.enter([0, 0, 0, 2, 2, 2]))
    world.leave(world.enter([0, 0, 0, 1, 1, 1]))
    world.enter([9, 9, 9, 8, 8, 8])
    assert world.tree.match(ids([0, 0, 0, 2, 2, 2]), 6).num_tokens(BLOCK) == 3
    assert world.tree.match(ids([0, 0, 0, 1, 1, 1]), 6).num_tokens(BLOCK) == 6


def test_a_prefix_whose_last_reader_was_admitted_is_freed_with_its_last_user():
    """And an ancestor that still has a future stays."""
    world = Rows()
    table = world.enter([0, 0, 0, 1, 1, 1])
    leaf = world.tree.match(ids([0, 0, 0, 1, 1, 1]), 6).nodes[-1]
    world.tree.mark_last_reader(leaf, keep_len=3)
    world.leave(table)
    assert world.tree.match(ids([0, 0, 0, 1, 1, 1]), 6).num_tokens(BLOCK) == 3
    assert world.pool.num_used == 1
