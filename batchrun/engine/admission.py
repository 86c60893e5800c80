"""Who enters: rows that wait and sequences that had to leave, as far as a place and the expected room allow.

Rows come in plan order, so that prefixes are shared. Admission reserves what running rows are expected to need still.
On which terms rows enter is the policy's.
"""

from bisect import insort
from collections import deque
from dataclasses import dataclass
from enum import Enum, auto
from operator import attrgetter

import numpy as np

from batchrun.engine.block_manager import BlockManager
from batchrun.engine.lane import NO_LANE, Lane
from batchrun.engine.lengths import OutputLengths
from batchrun.engine.next_step import NextStep
from batchrun.engine.radix import Prefix, common_len
from batchrun.engine.request import Request, TokenIds
from batchrun.engine.running import Running
from batchrun.engine.sequence import Sequence
from batchrun.engine.statistics import Counters

_NOTHING = Prefix(())
_MAX_SKIPS = 256  # rows that may pass one that does not fit, before it goes first


@dataclass(frozen=True, slots=True)
class Terms:
    """On which a policy lets rows in.

    `look_ahead` rows past one that does not fit may enter before it. Long prompts keep to the `lane`. With `is_whole` a
    prompt that others leave too little of a step waits for the next step; with `fills_batch` rows take their places
    though the step's budget is spent.
    """

    look_ahead: int = 0
    lane: Lane = NO_LANE
    is_whole: bool = False
    fills_batch: bool = False


class _Refusal(Enum):
    """Why a row does not enter now."""

    LANE = auto()  # another long prompt is being computed
    PREFIX = auto()  # a running row computes what it could share
    STEP = auto()  # too little of the step is left for its whole prompt
    ROOM = auto()  # its expected blocks do not fit, or no state is free


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A row outside, the `place`-th that came."""

    place: int
    request: Request


class Admission:
    """Owns the waiting rows, in plan order, and the preempted sequences, by arrival; makes them run."""

    def __init__(
        self,
        running: Running,
        blocks: BlockManager,
        lengths: OutputLengths,
        counters: Counters,
        max_num_seqs: int,
    ) -> None:
        self.preempted: list[Sequence] = []
        self._waiting: deque[_Waiting] = deque()
        self._long: list[_Waiting] = []  # found to be long when the lane was taken
        self._running = running
        self._blocks = blocks
        self._lengths = lengths
        self._counters = counters
        self._max_num_seqs = max_num_seqs
        self._num_added = 0
        self._num_started = 0
        self._neighbour: Sequence | None = None  # the row admitted last
        self._skips = 0  # rows that have passed the first of those that wait
        self._long_skips = 0  # and the first of the long ones, for which there was no room
        self._blocked_room: int | None = None  # room in blocks when admission last failed for lack of room only

    @property
    def has_rows(self) -> bool:
        return bool(self.num_waiting or self.preempted)

    @property
    def num_waiting(self) -> int:
        """Rows that nobody has begun."""
        return len(self._waiting) + len(self._long)

    def add(self, request: Request) -> None:
        """Queues a row, in plan order."""
        self._waiting.append(_Waiting(self._num_added, request))
        self._num_added += 1
        self._blocked_room = None

    def take_over(self, request: Request, host_slots: tuple[int, ...]) -> None:
        """Takes a row whose tokens but the last another engine has computed into these host slots. It enters as one
        that had to leave does, so before any waiting row."""
        sequence = Sequence(request, self._num_started)
        self._num_started += 1
        self._counters.prompt_tokens += sequence.prompt_len
        num_computed = sequence.num_tokens - 1
        self._blocks.take_over(sequence, host_slots, num_computed)
        sequence.num_lost, sequence.num_preemptions = num_computed, 1
        self.put_back(sequence)

    def close(self) -> tuple[Request, ...]:
        """Forgets the rows that nobody has begun; they are returned, in plan order."""
        rows = sorted((*self._long, *self._waiting), key=attrgetter("place"))
        self._waiting.clear()
        self._long.clear()
        return tuple(row.request for row in rows)

    def put_back(self, victim: Sequence) -> None:
        """Takes a sequence that had to leave; it comes back before any waiting row."""
        insort(self.preempted, victim, key=attrgetter("arrival"))
        self._blocked_room = None

    def look_again(self) -> None:
        """Somebody has ended: the next row may fit now."""
        self._blocked_room = None

    def admit(self, step: NextStep, terms: Terms) -> None:
        """Lets preempted sequences and then waiting rows in, unless somebody had to leave in this step."""
        if step.preempted:
            return
        step.places = self._max_num_seqs - sum(1 + sequence.num_forks for sequence in self._running)
        step.reserved = sum(self._still_needed(sequence) for sequence in self._running)
        if self._blocked_room is not None and self._blocks.room - step.reserved <= self._blocked_room:
            return
        self._blocked_room = None
        if not self._readmit(step, terms):
            return
        num_before = self._num_started
        is_stuck = self._admit_long(step, terms)
        if not is_stuck or self._long_skips < _MAX_SKIPS:
            num_passed = self._admit_waiting(step, terms)
            self._long_skips += num_passed if is_stuck else 0
        is_prefilling = any(step.rest(sequence) > 1 for sequence in self._running)
        is_whole = step.is_empty or not terms.is_whole  # else the step may have been too full, not the pool
        if self._num_started == num_before and is_whole and not is_prefilling and self.num_waiting:
            first = (self._long or self._waiting)[0].request
            self._blocked_room = self._blocks.room - step.reserved if self._may_enter(first, step, terms) else None

    def _readmit(self, step: NextStep, terms: Terms) -> bool:
        """Lets sequences back in that had to leave, in the order of their arrival; whether none is left outside."""
        while self.preempted and self._may_enter(self.preempted[0].request, step, terms):
            prefix = self._place_again(self.preempted[0], step, terms)
            if not isinstance(prefix, Prefix):
                return False
            self._enter(self.preempted.pop(0), prefix, step, terms)
        return not self.preempted

    def _admit_long(self, step: NextStep, terms: Terms) -> bool:
        """Lets the next long rows into the lane when it is free; whether the first one lacks only room."""
        while self._long and self._may_enter(self._long[0].request, step, terms):
            prefix = self._place(self._long[0].request, step, terms)
            if not isinstance(prefix, Prefix):
                return prefix is _Refusal.ROOM
            self._enter(self._start(self._long[0]), prefix, step, terms)
            del self._long[0]
            self._long_skips = 0
        return False

    def _admit_waiting(self, step: NextStep, terms: Terms) -> int:
        """Admits in plan order, looking a bounded number of rows past one that does not fit; how many entered."""
        at, num_before = 0, self._num_started
        while at < len(self._waiting) and self._may_enter(self._waiting[at].request, step, terms):
            row = self._waiting[at]
            prefix = self._place(row.request, step, terms)
            if isinstance(prefix, Prefix):
                self._enter(self._start(row), prefix, step, terms)
                self._skips = self._skips + 1 if at else 0
                del self._waiting[at]
            elif prefix is _Refusal.LANE:
                insort(self._long, row, key=attrgetter("place"))
                self._skips = self._skips if at else 0
                del self._waiting[at]
            elif at < terms.look_ahead and self._skips < _MAX_SKIPS:
                at += 1
            else:
                break
        return self._num_started - num_before

    def _start(self, row: _Waiting) -> Sequence:
        """Makes a waiting row a sequence. When no row before it waits, no other will match past its `keep_len`."""
        sequence = Sequence(row.request, self._num_started)
        sequence.is_last_reader = row.place == min(rows[0].place for rows in (self._waiting, self._long) if rows)
        self._num_started += 1
        self._neighbour = sequence
        self._counters.prompt_tokens += sequence.prompt_len
        return sequence

    def _may_enter(self, request: Request, step: NextStep, terms: Terms) -> bool:
        return (step.budget > 0 or terms.fills_batch) and request.num_sequences <= step.places

    def _place(self, request: Request, step: NextStep, terms: Terms) -> Prefix | _Refusal:
        """The prefix that a waiting row would start from, or why it does not enter now."""
        tokens = _tokens_of(request)
        shareable = tokens[: request.shareable_len(len(tokens)) + 1]
        prefix = self._prefix(shareable, step) if self._blocks.shares_prefixes else _NOTHING
        num_new = len(tokens) - prefix.num_tokens(self._blocks.block_size)
        if terms.lane.is_long(num_new) and any(terms.lane.is_long(step.rest(other)) for other in self._running):
            return _Refusal.LANE
        prompt_len = len(request.token_ids)
        expected_len = prompt_len + self._lengths.expected(request.sampling, len(request.output_ids))
        num_blocks = self._blocks.blocks_of_row(prompt_len, expected_len, request.num_sequences - 1)
        return self._checked(prefix, shareable, num_new, num_blocks, step, terms)

    def _place_again(self, sequence: Sequence, step: NextStep, terms: Terms) -> Prefix | _Refusal:
        """The same for a sequence that had to leave; it has been in the lane already."""
        num_blocks = self._blocks.blocks_of_row(sequence.prompt_len, self._expected_len(sequence), sequence.num_forks)
        if sequence.swapped is None:
            shareable = sequence.shareable
            prefix = self._prefix(shareable, step)
            num_new = sequence.num_tokens - prefix.num_tokens(self._blocks.block_size)
            return self._checked(prefix, shareable, num_new, num_blocks, step, terms)
        prefix = self._blocks.tree.match(sequence.tokens, sequence.swapped.num_computed)
        return prefix if self._has_room(prefix, num_blocks, step) else _Refusal.ROOM

    def _checked(
        self, prefix: Prefix, tokens: TokenIds, num_new: int, num_blocks: int, step: NextStep, terms: Terms
    ) -> Prefix | _Refusal:
        """`prefix`, unless it is better to wait or there is no room. `num_new` tokens are to be computed behind it, and
        `num_blocks` expected to be used in the end."""
        num_matched = prefix.num_tokens(self._blocks.block_size)
        if not self._blocks.has_state_slot:
            return _Refusal.ROOM
        if not terms.fills_batch and self._is_being_computed(tokens, num_matched, step):
            return _Refusal.PREFIX
        if terms.is_whole and not step.is_empty and num_new > step.budget:
            return _Refusal.STEP
        return prefix if self._has_room(prefix, num_blocks, step) else _Refusal.ROOM

    def _has_room(self, prefix: Prefix, num_blocks: int, step: NextStep) -> bool:
        """Whether the blocks that a row is expected to need beyond the prefix are nobody's; true when nobody runs."""
        needed = num_blocks - self._blocks.held(prefix)
        return not self._running or needed <= self._blocks.room - step.reserved

    def _prefix(self, tokens: TokenIds, step: NextStep) -> Prefix:
        """What the tree holds of the tokens but the last one; or the same blocks and more tokens out of the last,
        partly filled block of the neighbour's prompt, which is not in the tree."""
        prefix = self._blocks.tree.match(tokens, len(tokens) - 1)
        neighbour, block_size = self._neighbour, self._blocks.block_size
        if neighbour is None or not neighbour.block_table or not self._blocks.shares_prefixes:
            return prefix
        start = len(prefix.nodes) * block_size
        placed = min(neighbour.num_computed + step.counts.get(neighbour, 0), neighbour.prompt_len)
        shared = min(common_len(tokens[:-1], neighbour.tokens[:placed]) - start, block_size)
        if shared <= prefix.partial_len:
            return prefix
        return Prefix(prefix.nodes, neighbour.block_table[len(prefix.nodes)], shared)

    def _is_being_computed(self, tokens: TokenIds, num_matched: int, step: NextStep) -> bool:
        """Whether a running prompt will soon hold a block more of these tokens."""
        soon = num_matched + self._blocks.block_size
        return self._blocks.shares_prefixes and any(
            step.rest(other) > 1
            and other.node is not None
            and common_len(tokens, other.tokens[: other.prompt_len]) >= soon
            for other in self._running
        )

    def _enter(self, sequence: Sequence, prefix: Prefix, step: NextStep, terms: Terms) -> None:
        """Makes a sequence run from `prefix` on, or from what the host kept of it."""
        self._blocks.attach(sequence, prefix)
        if sequence.swapped is None:
            step.copy(self._blocks.copy_partial(sequence, prefix))
        elif (back := self._blocks.swap_in(sequence, sequence.swapped)) is not None:
            step.swap_ins.append(back)
        if sequence.is_last_reader:
            self._blocks.tree.mark_last_reader(sequence.node, sequence.request.keep_len)
        if sequence.num_preemptions:
            self._counters.recomputed_tokens += max(0, sequence.num_lost - sequence.num_computed)
        else:
            sequence.cached_tokens = min(sequence.num_computed, sequence.prompt_len)
            self._counters.cached_tokens += sequence.cached_tokens
        self._running.add(sequence)
        step.places -= 1 + sequence.num_forks
        step.extend(sequence, terms.lane.share(sequence.gap, step.budget))
        step.reserved += self._still_needed(sequence)

    def _still_needed(self, sequence: Sequence) -> int:
        """Blocks that the sequence, and those forked from it, are expected to ask for until their end."""
        end = self._expected_len(sequence)
        lacking = max(0, self._blocks.lacking(sequence, end))
        if not sequence.num_forks:
            return lacking
        return lacking + self._blocks.blocks_of_forks(sequence.prompt_len, end, sequence.num_forks)

    def _expected_len(self, sequence: Sequence) -> int:
        return sequence.prompt_len + self._lengths.expected(sequence.request.sampling, sequence.output_len)


def _tokens_of(request: Request) -> TokenIds:
    """Prompt and the output from before a resume."""
    if not request.output_ids:
        return request.token_ids
    return np.concatenate([request.token_ids, np.array(request.output_ids, dtype=np.int32)])
