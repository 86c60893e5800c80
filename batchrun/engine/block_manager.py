"""Which blocks and host places each sequence holds: the pool, the tree and the host's free places under one roof.

Every block enters and leaves a sequence's block table here. Knows nothing of budgets, order or who should run.
"""

from collections import Counter
from collections.abc import Iterable

from batchrun.engine.blocks import BlockPool
from batchrun.engine.radix import Prefix, RadixTree, common_len
from batchrun.engine.sequence import Sequence, Swapped
from batchrun.engine.step import SwapIn, SwapOut

# What an attention kernel fetches at once where blocks are consecutive.
_RUN_TOKENS = 64


class BlockManager:
    """`num_blocks` of `block_size` tokens in the pool, `num_host_slots` of the same size on the host.

    Unless it `shares_prefixes`, the tree only keeps what sequences had to leave behind, until they are back.

    With `num_state_slots` each sequence holds a slot for its state from its first block to its last. A state belongs to
    the whole sequence, so blocks are of no use to others, nor to one that left its state behind: the tree stays empty.
    A sequence whose blocks are on the host keeps its slot, which nobody could use: nobody enters before it is back.
    """

    def __init__(
        self, num_blocks: int, num_host_slots: int, block_size: int, *, shares_prefixes: bool, num_state_slots: int = 0
    ) -> None:
        self.block_size = block_size
        self.num_host_slots = num_host_slots
        self.num_state_slots = num_state_slots
        self.shares_prefixes = shares_prefixes and not num_state_slots
        self.pool = BlockPool(num_blocks, run_len=max(1, _RUN_TOKENS // block_size))
        self.tree = RadixTree(self.pool, block_size)
        self._free_host_slots = list(range(num_host_slots - 1, -1, -1))
        self._lent_host_slots: set[int] = set()
        self._free_state_slots = list(range(num_state_slots - 1, -1, -1))
        self._pinned: list[int] = []
        self.most_in_use = 0  # in any step so far

    @property
    def room(self) -> int:
        """Blocks that can be had without preempting anybody."""
        return self.pool.num_free + self.tree.num_evictable

    @property
    def num_in_use(self) -> int:
        """Blocks that a sequence references."""
        return self.pool.num_used - self.tree.num_evictable

    @property
    def num_free_host_slots(self) -> int:
        return len(self._free_host_slots)

    @property
    def has_state_slot(self) -> bool:
        """Whether one more sequence may have a state; true where sequences have none."""
        return bool(self._free_state_slots) or not self.num_state_slots

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def lacking(self, sequence: Sequence, end: int) -> int:
        """Blocks the sequence needs besides its own to hold `end` tokens; negative when it has more."""
        has_to_part = end > sequence.num_computed and self._ends_in_common(sequence)
        return self.blocks_for(end) - len(sequence.block_table) + has_to_part

    def blocks_of_row(self, prompt_len: int, end: int, num_forks: int) -> int:
        """Blocks that a sequence and its forks take at most when each has `end` tokens."""
        return self.blocks_for(end) + self.blocks_of_forks(prompt_len, end, num_forks)

    def blocks_of_forks(self, prompt_len: int, end: int, num_forks: int) -> int:
        """Blocks that forks take at most besides those of their prompt, which they share."""
        return num_forks * (self.blocks_for(end) - prompt_len // self.block_size)

    def held(self, prefix: Prefix) -> int:
        """Blocks of a prefix that sequences use already, so that one more user costs no room."""
        return sum(self.pool.ref_counts[node.block] > 1 for node in prefix.nodes)

    def attach(self, sequence: Sequence, prefix: Prefix) -> None:
        """Gives a sequence without blocks the whole blocks of a prefix, and a slot for its state if it needs one."""
        if self.num_state_slots and sequence.state_slot is None:
            sequence.state_slot = self._free_state_slots.pop()
        blocks = [node.block for node in prefix.nodes]
        self.tree.acquire(blocks)
        sequence.block_table = blocks
        sequence.node = prefix.nodes[-1] if prefix.nodes else self.tree.root
        sequence.num_published = len(blocks)
        sequence.num_computed = len(blocks) * self.block_size

    def copy_partial(self, sequence: Sequence, prefix: Prefix) -> list[tuple[int, int]]:
        """Makes the equal beginning of a block that then differs the sequence's own (copy on write).

        Returns (source, destination) slots to be copied in this step. The source is nobody else's until `unpin`.
        """
        if not prefix.partial_len or self.room < 2:
            return []
        source = prefix.partial_block
        self.tree.acquire([source])
        self._pinned.append(source)
        block = self._allocate(sequence)
        sequence.block_table.append(block)
        sequence.num_computed += prefix.partial_len
        offsets = range(prefix.partial_len)
        return [(source * self.block_size + offset, block * self.block_size + offset) for offset in offsets]

    def fork(self, parent: Sequence, fork: Sequence) -> None:
        """Gives a sequence without blocks those of another one in which their tokens are the same: with the one in
        which they begin to differ, until somebody writes there (see `part`)."""
        end = min(common_len(fork.tokens, parent.tokens), parent.num_computed)
        fork.block_table = parent.block_table[: self.blocks_for(end)]
        self.tree.acquire(fork.block_table)
        fork.num_computed = end
        fork.node, fork.num_published = parent.node, min(parent.num_published, end // self.block_size)
        while fork.node is not None and fork.node.end > end:
            fork.node = fork.node.parent

    def part(self, sequence: Sequence) -> list[tuple[int, int]]:
        """Copies the block that the sequence is about to write to, where a fork has it too (copy on write).

        Returns (source, destination) slots to be copied in this step; none when there is no room. The source stays the
        others' of its row.
        """
        if not self._ends_in_common(sequence) or not self.room:
            return []
        source = sequence.block_table.pop()
        block = self._allocate(sequence)
        sequence.block_table.append(block)
        self.tree.release([source])
        offsets = range(sequence.num_computed % self.block_size)
        return [(source * self.block_size + offset, block * self.block_size + offset) for offset in offsets]

    def _ends_in_common(self, sequence: Sequence) -> bool:
        """Whether the next token's place is in a block that a fork has as well."""
        if sequence.request.beams is None or sequence.num_computed < sequence.prompt_len:
            return False
        at = sequence.num_computed // self.block_size
        return at < len(sequence.block_table) and self.pool.ref_counts[sequence.block_table[at]] > 1

    def unpin(self) -> None:
        """The step is put together: whoever gets the copies' sources next writes to them in a later one."""
        self.most_in_use = max(self.most_in_use, self.num_in_use)
        for block in self._pinned:
            self.tree.release([block])
        self._pinned.clear()

    def grow(self, sequence: Sequence, end: int) -> int:
        """Gives the sequence blocks for `end` tokens as far as there is room; the tokens that it has room for now."""
        if self._ends_in_common(sequence):
            return sequence.num_computed
        for _ in range(min(self.lacking(sequence, end), self.room)):
            sequence.block_table.append(self._allocate(sequence))
        return min(end, len(sequence.block_table) * self.block_size)

    def shrink(self, sequence: Sequence) -> None:
        """Takes blocks back that only a wrong guess has filled."""
        num_needed = self.blocks_for(sequence.num_computed)
        self.tree.release(sequence.block_table[num_needed:])
        del sequence.block_table[num_needed:]

    def publish(self, sequence: Sequence, end: int) -> None:
        """Enters the sequence's full blocks up to `end` into the tree, so that the next rows can share them."""
        if self.shares_prefixes:
            self.keep(sequence, end)

    def keep(self, sequence: Sequence, end: int) -> None:
        """The same for the sequence's own sake, which has to leave and finds them when it is back."""
        size = self.block_size
        if self.num_state_slots:
            return
        while sequence.node is not None and (sequence.num_published + 1) * size <= end:
            at = sequence.num_published
            is_past = sequence.is_last_reader and (at + 1) * size > sequence.request.keep_len
            tokens = sequence.tokens[at * size : (at + 1) * size]
            sequence.node = self.tree.insert(sequence.node, tokens, sequence.block_table[at], has_future=not is_past)
            sequence.num_published += sequence.node is not None

    def release(self, sequence: Sequence) -> None:
        """Takes all blocks from the sequence; what it has published stays while somebody may read it.

        Unless the host has its blocks, its state's slot goes, too.
        """
        if sequence.swapped is None:
            self._release_state(sequence)
        self.tree.release(sequence.block_table)
        sequence.block_table = []
        sequence.node = None
        sequence.num_published = 0

    def num_own(self, row: list[Sequence]) -> int:
        """Blocks that nobody uses but these sequences, of one row; they would be free without them."""
        if len(row) == 1:
            return len(row[0].block_table) - self.num_shared(row[0])
        uses = Counter(block for sequence in row for block in sequence.block_table)
        return sum(self.pool.ref_counts[block] <= num + self.tree.holds(block) for block, num in uses.items())

    def num_shared(self, sequence: Sequence) -> int:
        """Leading blocks that other sequences use too."""
        counts = self.pool.ref_counts
        for at, block in enumerate(sequence.block_table):
            if counts[block] <= 1 + (at < sequence.num_published):
                return at
        return len(sequence.block_table)

    def swap_out(self, sequence: Sequence) -> SwapOut:
        """Finds host places for the sequence's own blocks; there must be enough. The sequence keeps the blocks."""
        num_shared = self.num_shared(sequence)
        leaving = sequence.block_table[num_shared:]
        slots = tuple(self._free_host_slots.pop() for _ in leaving)
        sequence.swapped = Swapped(num_shared, slots, sequence.num_computed)
        return SwapOut(tuple(leaving), slots)

    def swap_in(self, sequence: Sequence, swapped: Swapped) -> SwapIn | None:
        """Finds blocks for what the attached prefix does not hold. Without the prefix that was shared when the
        sequence left there is nothing to add the rest to: it stays at what is attached."""
        num_attached = len(sequence.block_table)
        self._free_host_slots.extend(swapped.host_slots)
        sequence.swapped = None
        if num_attached < swapped.first_block:
            return None
        slots = swapped.host_slots[num_attached - swapped.first_block :]
        for _ in slots:
            sequence.block_table.append(self._allocate(sequence))
        blocks = tuple(sequence.block_table[num_attached:])
        sequence.num_computed = swapped.num_computed
        return SwapIn(slots, blocks) if slots else None

    def lend_host_slots(self, num: int) -> tuple[int, ...]:
        """So many places on the host for another engine to write to; none when there are not as many."""
        if num > self.num_free_host_slots:
            return ()
        slots = tuple(self._free_host_slots.pop() for _ in range(num))
        self._lent_host_slots.update(slots)
        return slots

    def take_back(self, host_slots: tuple[int, ...]) -> None:
        """Lent places are free again."""
        self._lent_host_slots.difference_update(host_slots)
        self._free_host_slots.extend(host_slots)

    def take_over(self, sequence: Sequence, host_slots: tuple[int, ...], num_computed: int) -> None:
        """Lent places hold the first tokens of the sequence, which has no blocks."""
        self._lent_host_slots.difference_update(host_slots)
        sequence.swapped = Swapped(0, host_slots, num_computed)

    def forget_swapped(self, sequence: Sequence) -> None:
        """The sequence's places on the host and its state's slot are free again; what they hold is lost."""
        if sequence.swapped is not None:
            self._free_host_slots.extend(sequence.swapped.host_slots)
            sequence.swapped = None
            self._release_state(sequence)

    def _release_state(self, sequence: Sequence) -> None:
        if sequence.state_slot is not None:
            self._free_state_slots.append(sequence.state_slot)
            sequence.state_slot = None

    def _allocate(self, sequence: Sequence) -> int:
        if not self.pool.num_free:
            self.tree.evict()
        return self.pool.allocate(sequence.block_table)

    def check(self, running: Iterable[Sequence], preempted: Iterable[Sequence]) -> None:
        """States every invariant between two steps; for tests."""
        self.pool.check()
        self.tree.check()
        expected = [0] * self.pool.num_blocks
        for sequence in running:
            assert self.lacking(sequence, sequence.num_computed) == 0, "a block table does not cover its tokens"
            for block in sequence.block_table:
                expected[block] += 1
        stack = [self.tree.root]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node is not self.tree.root:
                expected[node.block] += 1
        assert expected == self.pool.ref_counts, "reference counts differ from the references there are"
        kept = [slot for sequence in preempted if sequence.swapped for slot in sequence.swapped.host_slots]
        host_slots = sorted([*kept, *self._lent_host_slots, *self._free_host_slots])
        assert host_slots == list(range(self.num_host_slots)), "host slots lost or doubled"
        holders = [*running, *(sequence for sequence in preempted if sequence.swapped)] if self.num_state_slots else []
        slots = [-1 if sequence.state_slot is None else sequence.state_slot for sequence in holders]
        assert sorted(slots + self._free_state_slots) == list(range(self.num_state_slots)), "states lost or doubled"
