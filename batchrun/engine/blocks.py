"""The pool of KV blocks: a free list and a reference count per block. Integers only; no tensor lives here.

A block is referenced once by every sequence whose block table holds it and once by the radix tree when a node
holds it. It returns to the free list with its last reference.
"""


class BlockPool:
    """`num_blocks` blocks, all free at first; block ids are 0 ... num_blocks - 1."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def allocate(self) -> int:
        """A free block with one reference; the caller has made sure that there is one."""
        block = self._free.pop()
        self.ref_counts[block] = 1
        return block

    def add_reference(self, block: int) -> int:
        """One more reference; the new count."""
        self.ref_counts[block] += 1
        return self.ref_counts[block]

    def drop_reference(self, block: int) -> int:
        """One reference less; the new count. At 0 the block is free again."""
        count = self.ref_counts[block] - 1
        self.ref_counts[block] = count
        if count == 0:
            self._free.append(block)
        return count

    def check(self) -> None:
        """Every block is free or referenced, never both."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is twice in the free list"
        for block, count in enumerate(self.ref_counts):
            assert (count == 0) == (block in free), (block, count, block in free)
