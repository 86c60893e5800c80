"""The sequences that run: how they get tokens of a step, and how one of them leaves when there is no room.

Which of them come first is a policy's; who enters is `admission`'s. A row is one sequence, or its beams: they leave
together, and the first one stands for them until they are back.
"""

from bisect import insort
from collections.abc import Iterator
from itertools import groupby
from operator import attrgetter

from batchrun.engine.block_manager import BlockManager
from batchrun.engine.lane import NO_LANE, Lane
from batchrun.engine.next_step import NextStep
from batchrun.engine.preemption import Costs, Preemption, choose_victim, choose_way
from batchrun.engine.sequence import Sequence
from batchrun.engine.statistics import Counters


class Running:
    """Sequences by arrival. Iterating goes over those that are there when it begins."""

    def __init__(self, blocks: BlockManager, preemption: Preemption, costs: Costs, counters: Counters) -> None:
        self._blocks = blocks
        self._preemption: Preemption = preemption
        self._costs = costs
        self._counters = counters
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(tuple(self._sequences))

    @property
    def rows(self) -> list[list[Sequence]]:
        """The sequences by row."""
        return [list(row) for _, row in groupby(self._sequences, key=attrgetter("arrival"))]

    def add(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=attrgetter("arrival"))

    def remove(self, sequence: Sequence) -> None:
        self._sequences.remove(sequence)

    def decode(self, step: NextStep) -> None:
        """Gives those that decode their token, oldest first; makes one sequence leave when there is no room."""
        for sequence in self:
            if sequence.is_decoding:
                self._extend(sequence, step.budget, step)

    def prefill(self, step: NextStep, lane: Lane = NO_LANE) -> None:
        """Gives the others what they ask for, oldest first, a long one its share; makes one leave as `decode` does."""
        for sequence in self:
            if not sequence.is_decoding:
                self._extend(sequence, lane.share(sequence.gap, step.budget), step)

    def top_up(self, step: NextStep) -> None:
        """Spends what is left of the budget on prompts whose chunk was kept short for others' sake."""
        for sequence in self:
            if step.budget <= 0:
                return
            if sequence in step.counts and step.rest(sequence) > 0:
                step.extend(sequence, step.budget + step.counts[sequence])

    def _extend(self, sequence: Sequence, limit: int, step: NextStep) -> None:
        if sequence in step.preempted or sequence.is_full:
            return
        if self._blocks.lacking(sequence, step.end_of(sequence, limit)) > self._blocks.room:
            self._preempt_one(sequence, step)
        if sequence not in step.preempted:
            step.extend(sequence, limit)

    def _preempt_one(self, sequence: Sequence, step: NextStep) -> None:
        """Makes one row leave for a sequence without room: at most one a step, never the oldest, and with beams only
        one that is younger than its own."""
        if step.preempted:
            return
        oldest = 0 if sequence.request.beams is None else sequence.arrival + 1
        rows = {
            row[0]: row
            for row in self.rows[1:]
            if row[0].arrival >= oldest and not any(one in step.counts or one.is_full for one in row)
        }
        victim = choose_victim((first, self._blocks.num_own(row)) for first, row in rows.items())
        if victim is not None:
            self._preempt(rows[victim], step)

    def _preempt(self, row: list[Sequence], step: NextStep) -> None:
        first, num_own = row[0], self._blocks.num_own(row)
        num_tokens = min(first.num_computed, num_own * self._blocks.block_size)
        way = choose_way(self._preemption, self._costs, num_tokens, num_own, self._blocks.num_free_host_slots)
        if way == "swap" and first.request.beams is None:
            step.swap_outs.append(self._blocks.swap_out(first))
            self._counters.swap_preemptions += 1
        else:
            # What nobody needs the room of until the row is back need not be computed again.
            self._blocks.keep(first, first.num_computed)
            self._counters.recompute_preemptions += 1
        self._blocks.tree.mark_last_reader(first.node, 0, has_future=True)
        for sequence in row:
            sequence.num_lost, sequence.num_computed = sequence.num_computed, 0
            sequence.num_preemptions += 1
        self.leave(row)
        step.preempted = row

    def leave(self, row: list[Sequence]) -> None:
        """Takes a row's sequences out, and their blocks from them."""
        row[0].num_forks += len(row) - 1
        for sequence in row:
            self._blocks.release(sequence)
            self.remove(sequence)
