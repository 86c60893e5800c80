"""The pool of KV blocks: free blocks and a reference count per block. Integers only; no tensor lives here.

A block is referenced once by every sequence whose block table holds it and once by the radix tree when a node
holds it. It is free again with its last reference.

Which free block a sequence gets is no matter to results, but a kernel fetches consecutive ones faster. So the pool is
divided into runs: a sequence that begins one is given a whole free one's first block and, while nobody needs them
more, finds the others free when it grows.
"""

from collections import OrderedDict
from collections.abc import Sequence


class BlockPool:
    """`num_blocks` blocks, all free at first; block ids are 0 ... num_blocks - 1.

    A run is `run_len` blocks from a multiple of `run_len` on.
    """

    def __init__(self, num_blocks: int, run_len: int = 1) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self._run_len = run_len
        num_in_runs = num_blocks - num_blocks % run_len
        # The first blocks of the runs that are free as a whole, and the free blocks outside of those, oldest first: the
        # youngest are kept for tables that have begun their runs and still grow.
        self._runs = list(range(num_in_runs - run_len, -1, -run_len))
        self._parts = OrderedDict.fromkeys(range(num_in_runs, num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._runs) * self._run_len + len(self._parts)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def allocate(self, table: Sequence[int] = ()) -> int:
        """A free block with one reference, to be the next of a block table; the caller has made sure there is one.

        The one behind the table's last where it is free and lies in its run as the table's next does in the table.
        """
        place = len(table) % self._run_len
        if place and table[-1] % self._run_len == place - 1 and table[-1] + 1 in self._parts:
            block = table[-1] + 1
            del self._parts[block]
        elif self._runs and not (place and self._parts):
            block = self._runs.pop()
            self._parts.update(dict.fromkeys(range(block + 1, block + self._run_len)))
        else:
            block, _ = self._parts.popitem(last=False)
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
            self._free(block)
        return count

    def _free(self, block: int) -> None:
        first = block - block % self._run_len
        end = first + self._run_len
        if end > self.num_blocks or any(self.ref_counts[first:end]):
            self._parts[block] = None
            return
        for other in range(first, end):
            self._parts.pop(other, None)
        self._runs.append(first)

    def check(self) -> None:
        """Every block is free or referenced, never both, and of a run that is free nothing is free by itself."""
        in_runs = [block for first in self._runs for block in range(first, first + self._run_len)]
        free = {*in_runs, *self._parts}
        assert len(free) == len(in_runs) + len(self._parts) == self.num_free, "a block is free twice"
        for block, count in enumerate(self.ref_counts):
            assert (count == 0) == (block in free), (block, count, block in free)
