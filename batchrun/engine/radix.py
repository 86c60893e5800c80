"""The radix tree over KV blocks: which prefixes are in the pool, who may still read them, what goes first.

One edge per block. A node's key is its block's token ids; a sequence that uses a node references the node's block
and those of all its ancestors, so a node nobody but the tree references has no used descendant. The tree follows
RadixAttention (Zheng et al., SGLang, 2024, section 3) with a fixed stride, plus what only an offline job knows:
a node whose last reader has been admitted has no future and is freed with its last user, before anything in LRU
order.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from batchrun.engine.blocks import BlockPool
from batchrun.engine.request import TokenIds

_TOKEN_BYTES = 4


class Node:
    """One block of a prefix; `end` is the prefix's length in tokens up to and including it."""

    __slots__ = ("block", "children", "end", "has_future", "key", "keys", "parent")

    def __init__(self, parent: "Node | None", key: bytes, block: int, end: int) -> None:
        self.parent = parent
        self.key = key
        self.block = block
        self.end = end
        self.has_future = True
        self.children: dict[bytes, Node] = {}
        self.keys: list[bytes] = []  # sorted: the child that shares most with a key is beside it


@dataclass(frozen=True, slots=True)
class Prefix:
    """What the pool holds of a sequence: whole nodes from the root, and the first `partial_len` tokens of a block."""

    nodes: tuple[Node, ...]
    partial_block: int = -1
    partial_len: int = 0

    def num_tokens(self, block_size: int) -> int:
        return len(self.nodes) * block_size + self.partial_len


class RadixTree:
    """Prefixes in the pool."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.root = Node(None, b"", -1, 0)
        self.num_evictable = 0
        self._pool = pool
        self._block_size = block_size
        self._node_of: dict[int, Node] = {}
        self._lru: OrderedDict[Node, None] = OrderedDict()  # unreferenced leaves, oldest first

    @property
    def num_nodes(self) -> int:
        return len(self._node_of)

    def holds(self, block: int) -> bool:
        """Whether the block is a node's."""
        return block in self._node_of

    def match(self, tokens: TokenIds, limit: int) -> Prefix:
        """The longest prefix of `tokens[:limit]` in the tree, token by token; changes nothing."""
        node, nodes = self.root, []
        keys = _keys(tokens[:limit], self._block_size)
        for key in keys:
            child = node.children.get(key)
            if child is None:
                break
            nodes.append(child)
            node = child
        rest = tokens[node.end : min(limit, node.end + self._block_size)]
        return Prefix(tuple(nodes), *_closest(node, rest.astype(">i4").tobytes()))

    def acquire(self, blocks: Iterable[int]) -> None:
        """References blocks for a sequence, from the root downwards."""
        for block in blocks:
            if self._pool.add_reference(block) == 2 and block in self._node_of:
                self.num_evictable -= 1
                self._lru.pop(self._node_of[block], None)

    def release(self, blocks: Sequence[int]) -> None:
        """Drops a sequence's references, deepest block first; nodes without a future go at once."""
        for block in reversed(blocks):
            count = self._pool.drop_reference(block)
            node = self._node_of.get(block)
            if count == 1 and node is not None:
                self.num_evictable += 1
                self._became_unreferenced(node)

    def insert(self, parent: Node, tokens: TokenIds, block: int, *, has_future: bool) -> Node | None:
        """Adds the block behind `parent`; None when the tree holds these tokens already."""
        key = tokens.astype(">i4").tobytes()
        if key in parent.children:
            return None
        node = Node(parent, key, block, parent.end + self._block_size)
        node.has_future = has_future
        parent.children[key] = node
        insort(parent.keys, key)
        self._node_of[block] = node
        self._lru.pop(parent, None)
        self._pool.add_reference(block)
        return node

    def mark_last_reader(self, node: Node | None, keep_len: int, *, has_future: bool = False) -> None:
        """States of all nodes from `node` upwards that reach past `keep_len` whether somebody will still match them."""
        while node is not None and node.end > keep_len:
            node.has_future = has_future
            node = node.parent

    def evict(self) -> int:
        """Frees the least recently used unreferenced leaf; its block id. There must be one."""
        node, _ = self._lru.popitem(last=False)
        block = node.block
        self._remove(node)
        return block

    def clear(self) -> None:
        """Forgets every unreferenced node."""
        while self._lru:
            self.evict()

    def _became_unreferenced(self, node: Node) -> None:
        if node.children:
            return
        if node.has_future:
            self._lru[node] = None
        else:
            self._remove(node)

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None, "the root is never removed"
        assert not node.children, "only leaves are removed"
        del parent.children[node.key]
        del parent.keys[bisect_left(parent.keys, node.key)]
        del self._node_of[node.block]
        self.num_evictable -= 1
        self._pool.drop_reference(node.block)
        if parent is not self.root and self._pool.ref_counts[parent.block] == 1 and not parent.children:
            if parent.has_future:
                self._lru[parent] = None
                self._lru.move_to_end(parent, last=False)
            else:
                self._remove(parent)

    def check(self) -> None:
        """States every invariant of the tree."""
        stack, seen, evictable, leaves = [self.root], 0, 0, set()
        while stack:
            node = stack.pop()
            assert node.keys == sorted(node.children), "sorted keys and children differ"
            stack.extend(node.children.values())
            if node is self.root:
                continue
            seen += 1
            assert self._node_of[node.block] is node, node.block
            assert node.parent is not None
            assert node.end == node.parent.end + self._block_size
            count = self._pool.ref_counts[node.block]
            assert count >= 1, "the tree holds a free block"
            if node.parent is not self.root:
                assert self._pool.ref_counts[node.parent.block] >= 2 or count == 1, "used below an unused node"
            if count == 1:
                evictable += 1
                if not node.children:
                    leaves.add(node)
                    assert node.has_future, "a node without a future outlived its last user"
        assert seen == len(self._node_of)
        assert evictable == self.num_evictable, (evictable, self.num_evictable)
        assert leaves == set(self._lru), "the LRU list is not the set of unreferenced leaves"


def common_len(first: TokenIds, second: TokenIds) -> int:
    """Length of the longest common prefix; tokens."""
    shorter = min(len(first), len(second))
    differing = np.flatnonzero(first[:shorter] != second[:shorter])
    return int(differing[0]) if len(differing) else shorter


def _keys(tokens: TokenIds, block_size: int) -> Iterable[bytes]:
    data = tokens.astype(">i4").tobytes()
    stride = block_size * _TOKEN_BYTES
    return (data[at : at + stride] for at in range(0, len(data) - stride + 1, stride))


def _closest(node: Node, rest: bytes) -> tuple[int, int]:
    """The block of the child that shares most tokens with `rest`, and how many; (-1, 0) when none does."""
    at = bisect_left(node.keys, rest)
    best, best_len = -1, 0
    for key in node.keys[max(at - 1, 0) : at + 1]:
        shared = _common_bytes(key, rest) // _TOKEN_BYTES
        if shared > best_len:
            best, best_len = node.children[key].block, shared
    return best, best_len


def _common_bytes(first: bytes, second: bytes) -> int:
    for at, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return at
    return min(len(first), len(second))
