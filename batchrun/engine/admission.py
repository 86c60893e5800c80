"""Who enters: rows that wait and sequences that had to leave, as far as a place and the expected room allow.

Rows come in plan order, so that prefixes are shared. Admission reserves what running rows are expected to need still.
"""

from bisect import insort
from collections import deque
from operator import attrgetter

import numpy as np

from batchrun.engine.block_manager import BlockManager
from batchrun.engine.draft import Draft
from batchrun.engine.lengths import OutputLengths
from batchrun.engine.policies import Policy
from batchrun.engine.radix import Prefix, common_len
from batchrun.engine.request import Request, TokenIds
from batchrun.engine.running import Running
from batchrun.engine.sequence import Sequence
from batchrun.engine.statistics import Counters

_MAX_SKIPS = 256  # rows that may pass one that does not fit, before it goes first


class Admission:
    """Owns the waiting rows, in plan order, and the preempted sequences, by arrival; makes them run."""

    def __init__(
        self,
        running: Running,
        blocks: BlockManager,
        lengths: OutputLengths,
        counters: Counters,
        policy: Policy,
        max_num_seqs: int,
    ) -> None:
        self.waiting: deque[Request] = deque()
        self.preempted: list[Sequence] = []
        self._running = running
        self._blocks = blocks
        self._lengths = lengths
        self._counters = counters
        self._policy = policy
        self._max_num_seqs = max_num_seqs
        self._arrivals = 0
        self._neighbour: Sequence | None = None  # the row admitted last
        self._head_skips = 0
        self._blocked_room: int | None = None  # room in blocks when admission last failed for lack of room only

    def add(self, request: Request) -> None:
        """Queues a row, in plan order."""
        self.waiting.append(request)
        self._blocked_room = None

    @property
    def has_rows(self) -> bool:
        return bool(self.waiting or self.preempted)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    def close(self) -> tuple[Request, ...]:
        """Forgets the waiting rows, which nobody has begun; they are returned."""
        waiting = tuple(self.waiting)
        self.waiting.clear()
        return waiting

    def put_back(self, victim: Sequence) -> None:
        """Takes a sequence that had to leave; it comes back before any waiting row."""
        insort(self.preempted, victim, key=attrgetter("arrival"))
        self._blocked_room = None

    def look_again(self) -> None:
        """Somebody has ended: the next row may fit now."""
        self._blocked_room = None

    def admit(self, draft: Draft) -> None:
        """Lets preempted sequences and then waiting rows in, unless somebody had to leave in this step."""
        if draft.preempted is not None or (self._running and not self._policy.admits_while_running):
            return
        draft.reserved = sum(self._still_needed(sequence) for sequence in self._running)
        if self._blocked_room is not None and self._blocks.room - draft.reserved <= self._blocked_room:
            return
        self._blocked_room = None
        while self.preempted and self._may_enter(draft):
            sequence = self.preempted[0]
            held = sequence.swapped.num_computed if sequence.swapped else None
            prefix = self._place(sequence.tokens, self._expected_len(sequence), held, draft)
            if prefix is None:
                return
            self._enter(self.preempted.pop(0), prefix, draft)
        if not self.preempted:
            self._admit_waiting(draft)

    def _admit_waiting(self, draft: Draft) -> None:
        """Admits in plan order, looking a bounded number of rows past one that does not fit."""
        at, num_admitted = 0, 0
        while at < len(self.waiting) and self._may_enter(draft):
            request = self.waiting[at]
            prefix = self._place(_tokens_of(request), self._final_len(request), None, draft)
            if prefix is not None:
                self._enter(self._start(at), prefix, draft)
                num_admitted += 1
            elif at < self._policy.look_ahead and self._head_skips < _MAX_SKIPS:
                at += 1
            else:
                break
        is_prefilling = any(draft.rest(sequence) > 1 for sequence in self._running)
        if not num_admitted and self.waiting and self._may_enter(draft) and not is_prefilling:
            self._blocked_room = self._blocks.room - draft.reserved

    def _start(self, at: int) -> Sequence:
        """Makes the waiting row at place `at` a sequence."""
        sequence = Sequence(self.waiting[at], self._arrivals)
        del self.waiting[at]
        sequence.is_last_reader = at == 0
        self._head_skips = self._head_skips + 1 if at else 0
        self._arrivals += 1
        self._neighbour = sequence
        self._counters.prompt_tokens += sequence.prompt_len
        return sequence

    def _may_enter(self, draft: Draft) -> bool:
        has_budget = draft.budget > 0 or not self._policy.admits_while_running
        return has_budget and len(self._running) < self._max_num_seqs

    def _place(self, tokens: TokenIds, final_len: int, num_swapped: int | None, draft: Draft) -> Prefix | None:
        """The prefix a row would start from if it can enter now: its expected blocks fit, and nobody computes at
        this moment what it could share. `num_swapped` tokens wait on the host; None: none."""
        prefix = self._blocks.tree.match(tokens, len(tokens) - 1 if num_swapped is None else num_swapped)
        if num_swapped is None:
            prefix = self._closer(prefix, tokens, draft)
            if self._must_wait(tokens, prefix.num_tokens(self._blocks.block_size), draft):
                return None
        needed = self._blocks.blocks_for(final_len) - self._blocks.held(prefix)
        return prefix if not self._running or needed <= self._blocks.room - draft.reserved else None

    def _closer(self, prefix: Prefix, tokens: TokenIds, draft: Draft) -> Prefix:
        """`prefix`, or the same blocks and more tokens out of the last, partly filled block of the neighbour's
        prompt, which is not in the tree."""
        neighbour, block_size = self._neighbour, self._blocks.block_size
        if neighbour is None or not neighbour.block_table or not self._blocks.tree.is_enabled:
            return prefix
        start = len(prefix.nodes) * block_size
        placed = min(neighbour.num_computed + draft.counts.get(neighbour, 0), neighbour.prompt_len)
        shared = min(common_len(tokens[:-1], neighbour.tokens[:placed]) - start, block_size)
        if shared <= prefix.partial_len:
            return prefix
        return Prefix(prefix.nodes, neighbour.block_table[len(prefix.nodes)], shared)

    def _must_wait(self, tokens: TokenIds, num_matched: int, draft: Draft) -> bool:
        """Whether a running prompt will soon hold more of these tokens, or is a long one and so is this."""
        if not self._policy.admits_while_running:
            return False
        for other in self._running:
            rest = draft.rest(other)
            if rest <= 1:
                continue
            if self._policy.shares_with_long and draft.is_long(rest) and draft.is_long(len(tokens) - num_matched):
                return True
            soon = num_matched + self._blocks.block_size
            if other.node is not None and common_len(tokens, other.tokens[: other.prompt_len]) >= soon:
                return True
        return False

    def _enter(self, sequence: Sequence, prefix: Prefix, draft: Draft) -> None:
        """Makes a sequence run from `prefix` on, or from what the host kept of it."""
        self._blocks.attach(sequence, prefix)
        if sequence.swapped is None:
            draft.copy(self._blocks.copy_partial(sequence, prefix))
        elif (back := self._blocks.swap_in(sequence, sequence.swapped)) is not None:
            draft.swap_ins.append(back)
        if sequence.is_last_reader:
            self._blocks.tree.mark_last_reader(sequence.node, sequence.request.keep_len)
        if sequence.num_preemptions:
            self._counters.recomputed_tokens += max(0, sequence.num_lost - sequence.num_computed)
        else:
            sequence.cached_tokens = min(sequence.num_computed, sequence.prompt_len)
            self._counters.cached_tokens += sequence.cached_tokens
        self._running.add(sequence)
        draft.extend(sequence, draft.share(sequence))
        draft.reserved += self._still_needed(sequence)

    def _still_needed(self, sequence: Sequence) -> int:
        """Blocks the sequence is expected to ask for until its end."""
        return max(0, self._blocks.lacking(sequence, self._expected_len(sequence)))

    def _expected_len(self, sequence: Sequence) -> int:
        return sequence.prompt_len + self._lengths.expected(sequence.request.sampling, sequence.output_len)

    def _final_len(self, request: Request) -> int:
        return len(request.token_ids) + self._lengths.expected(request.sampling, len(request.output_ids))


def _tokens_of(request: Request) -> TokenIds:
    """Prompt and the output from before a resume."""
    if not request.output_ids:
        return request.token_ids
    return np.concatenate([request.token_ids, np.array(request.output_ids, dtype=np.int32)])
