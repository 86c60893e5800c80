"""Decides every step: which tokens of which sequences are computed, who enters, and who has to make room.

There are no phases. A step spends a budget of tokens on closing the gap between what a sequence has and what is
computed of it. It counts as done once it is scheduled: the next one may be scheduled before its tokens are known.
Knows token ids and integers; no tensor, text, clock or randomness. Work per step is O(running + admitted), whatever
waits. Iteration-level scheduling follows Orca (Yu et al., OSDI 2022, section 3), paged blocks vLLM (Kwon et al., SOSP
2023, section 4).
"""

from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from batchrun.engine.block_manager import BlockManager
from batchrun.engine.lengths import OutputLengths
from batchrun.engine.policies import POLICIES, Pass, Schedule
from batchrun.engine.preemption import Costs, Preemption, choose_victim, choose_way
from batchrun.engine.radix import Prefix, common_len
from batchrun.engine.request import Completion, FinishReason, Request, TokenIds
from batchrun.engine.sequence import Sequence
from batchrun.engine.statistics import Counters, Statistics
from batchrun.engine.step import NO_TOKEN, Item, Sampled, ScheduledBatch, SwapIn, SwapOut
from batchrun.errors import EngineFailed, RowError

FindStop = Callable[[Sequence], str | None]

_NOT_FINITE = RowError("engine_error", "the model's logits are not finite; try --dtype float32 or bfloat16")
_MAX_SKIPS = 256  # rows that may pass one that does not fit, before it goes first


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """`num_blocks` of `block_size` tokens, `num_host_slots` of the same size, and the limits of a step."""

    num_blocks: int
    num_host_slots: int
    block_size: int
    block_bytes: int
    max_num_seqs: int
    max_num_batched_tokens: int
    eos_token_ids: frozenset[int]
    schedule: Schedule = "chunked"
    preemption: Preemption = "auto"
    prefix_caching: bool = True


class _Step:
    """The step being put together."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.counts: dict[Sequence, int] = {}
        self.preempted: Sequence | None = None
        self.reserved = 0  # blocks the running sequences are expected to need still
        self.swap_outs: list[SwapOut] = []
        self.swap_ins: list[SwapIn] = []
        self.copied_from: dict[int, int] = {}  # destination slot -> source slot

    def rest(self, sequence: Sequence) -> int:
        """Tokens of the sequence that are not computed even after this step."""
        return sequence.gap - self.counts.get(sequence, 0)

    def copy(self, copies: list[tuple[int, int]]) -> None:
        """Adds slot copies; a source that is itself a copy of this step is replaced by that one's source."""
        for source, destination in copies:
            self.copied_from[destination] = self.copied_from.get(source, source)

    def freeze(self) -> ScheduledBatch:
        items = tuple(
            Item(sequence, sequence.num_computed, count, count == sequence.gap)
            for sequence, count in self.counts.items()
        )
        copies = tuple((source, destination) for destination, source in self.copied_from.items())
        return ScheduledBatch(items, tuple(self.swap_outs), tuple(self.swap_ins), copies)


class Scheduler:
    """Owns the waiting rows and the running sequences."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.blocks = BlockManager(
            config.num_blocks, config.num_host_slots, config.block_size, prefix_caching=config.prefix_caching
        )
        self.lengths = OutputLengths()
        self.costs = Costs(bytes_per_token=config.block_bytes / config.block_size)
        self.counters = Counters()
        self.waiting: deque[Request] = deque()
        self.running: list[Sequence] = []  # by arrival
        self.preempted: list[Sequence] = []  # by arrival
        self._policy = POLICIES[config.schedule]
        self._arrivals = 0
        self._neighbour: Sequence | None = None  # the row admitted last
        self._head_skips = 0
        self._budget = config.max_num_batched_tokens
        self._blocked_room: int | None = None  # room in blocks when admission last failed for lack of room only

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting or self.preempted)

    @property
    def capacity(self) -> int:
        """Tokens the whole pool can hold."""
        return self.config.num_blocks * self.config.block_size

    @property
    def needs_known_tokens(self) -> bool:
        """Whether a step must not be scheduled while tokens are pending: a running row's penalties look at them."""
        return any(sequence.request.sampling.has_penalties for sequence in self.running)

    def add(self, request: Request) -> None:
        """Queues a row, in plan order. Its `max_len` must not exceed `capacity`."""
        assert request.max_len <= self.capacity, (request.row_idx, request.max_len, self.capacity)
        self.waiting.append(request)
        self._blocked_room = None

    def schedule(self) -> ScheduledBatch:
        """The next step; empty when all depends on tokens that are pending.

        Raises:
            EngineFailed: nothing can be scheduled although work remains; a bug, with the state in the message.
        """
        step = _Step(self._budget)
        for which in self._policy.passes:
            if which == "admit":
                self._admit(step)
            else:
                self._continue(which, step)
        self._top_up(step)
        batch = step.freeze()
        if not batch.items and not any(sequence.has_pending for sequence in (*self.running, *self.preempted)):
            raise EngineFailed(f"no sequence can be scheduled: {self._describe()}")
        self.blocks.unpin()
        self._advance(batch)
        return batch

    def _advance(self, batch: ScheduledBatch) -> None:
        """From here on the step's tokens are computed, for all that is scheduled after it."""
        for item in batch.items:
            item.sequence.num_computed = item.end
            if item.samples:
                item.sequence.expect()
        self.counters.swapped_bytes += batch.num_swapped * self.config.block_bytes

    def update(self, batch: ScheduledBatch, sampled: Sampled, find_stop: FindStop) -> list[Completion]:
        """Takes in a step's tokens; the rows that are finished by them. `find_stop` sees each extended sequence.

        Steps come in the order in which they were scheduled. A row that had ended before this step was, when nobody
        knew it yet, scheduled once more: its token is dropped.
        """
        completions = []
        for item, token in zip(batch.sampled, sampled.tokens.tolist(), strict=True):
            sequence = item.sequence
            if sequence.is_finished:
                continue
            if token == NO_TOKEN:
                completions.append(self._finish(sequence, "error", None, _NOT_FINITE))
                continue
            sequence.resolve(token)
            self.counters.output_tokens += 1
            ending = self._ending(sequence, token, find_stop)
            if ending is not None:
                completions.append(self._finish(sequence, *ending))
        self._count_step(batch)
        if sampled.was_split:
            self._budget = max(1, self._budget // 2)
        return completions

    def statistics(self) -> Statistics:
        """A snapshot of counters and gauges."""
        return Statistics(
            counters=replace(self.counters),
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_preempted=len(self.preempted),
            num_nodes=self.blocks.tree.num_nodes,
            kv_usage=self.blocks.num_in_use / max(self.config.num_blocks, 1),
        )

    # Running sequences.

    def _continue(self, which: Pass, step: _Step) -> None:
        """Gives running sequences, oldest first, the tokens they ask for."""
        for sequence in tuple(self.running):
            is_asked = which == "all" or (which == "decode") == (sequence.gap == 1)
            if is_asked and sequence not in step.counts and sequence is not step.preempted and not sequence.is_full:
                self._extend(sequence, self._share(sequence, step), step, may_preempt=True)

    def _top_up(self, step: _Step) -> None:
        """Spends what is left of the budget on prompts whose chunk was kept short for others' sake."""
        for sequence in tuple(self.running):
            if step.budget <= 0:
                return
            if sequence in step.counts and step.rest(sequence) > 0:
                self._extend(sequence, step.budget + step.counts[sequence], step, may_preempt=False)

    def _share(self, sequence: Sequence, step: _Step) -> int:
        """Tokens of the budget that the sequence may take now."""
        if self._policy.shares_with_long and self.waiting and self._is_long(sequence.gap):
            return min(step.budget, max(1, self._budget // 2))
        return step.budget

    def _is_long(self, num_tokens: int) -> bool:
        return num_tokens > self._budget

    def _extend(self, sequence: Sequence, limit: int, step: _Step, *, may_preempt: bool) -> None:
        """Schedules up to `limit` tokens of the sequence in this step, as far as there are blocks for them."""
        end = sequence.num_computed + min(sequence.gap, limit)
        if may_preempt and self.blocks.lacking(sequence, end) > self.blocks.room:
            self._preempt_one(step)
            if sequence is step.preempted:
                return
        end = self.blocks.grow(sequence, end)
        count = end - sequence.num_computed
        if count > 0:
            step.budget -= count - step.counts.get(sequence, 0)
            step.counts[sequence] = count
            self.blocks.publish(sequence, min(end, sequence.prompt_len))

    # Preemption.

    def _preempt_one(self, step: _Step) -> None:
        """Makes one sequence leave, at most one a step and never the oldest."""
        if step.preempted is not None:
            return
        candidates = [one for one in self.running[1:] if one not in step.counts and not one.is_full]
        victim = choose_victim((sequence, self._freed_by(sequence)) for sequence in candidates)
        if victim is not None:
            self._preempt(victim, step)

    def _freed_by(self, sequence: Sequence) -> int:
        """Blocks of its own that the sequence would leave behind."""
        return len(sequence.block_table) - self.blocks.num_shared(sequence)

    def _preempt(self, victim: Sequence, step: _Step) -> None:
        num_own = self._freed_by(victim)
        num_tokens = min(victim.num_computed, num_own * self.config.block_size)
        way = choose_way(self.config.preemption, self.costs, num_tokens, num_own, self.blocks.num_free_host_slots)
        if way == "swap":
            step.swap_outs.append(self.blocks.swap_out(victim))
            self.counters.swap_preemptions += 1
        else:
            # What nobody needs the room of until the victim is back need not be computed again.
            self.blocks.publish(victim, victim.num_computed)
            self.counters.recompute_preemptions += 1
        self.blocks.tree.mark_last_reader(victim.node, 0, has_future=True)
        self.blocks.release(victim)
        victim.num_lost, victim.num_computed = victim.num_computed, 0
        victim.num_preemptions += 1
        self.running.remove(victim)
        insort(self.preempted, victim, key=_arrival)
        self._blocked_room = None
        step.preempted = victim

    # Admission.

    def _admit(self, step: _Step) -> None:
        """Lets preempted sequences and then waiting rows in, unless somebody had to leave in this step."""
        if step.preempted is not None or (self.running and not self._policy.admits_while_running):
            return
        step.reserved = sum(self._still_needed(sequence) for sequence in self.running)
        if self._blocked_room is not None and self.blocks.room - step.reserved <= self._blocked_room:
            return
        self._blocked_room = None
        while self.preempted and self._may_enter(step):
            sequence = self.preempted[0]
            held = sequence.swapped.num_computed if sequence.swapped else None
            prefix = self._place(sequence.tokens, self._expected_len(sequence), held, step)
            if prefix is None:
                return
            self._enter(self.preempted.pop(0), prefix, step)
        if not self.preempted:
            self._admit_waiting(step)

    def _admit_waiting(self, step: _Step) -> None:
        """Admits in plan order, looking a bounded number of rows past one that does not fit."""
        at, num_admitted = 0, 0
        while at < len(self.waiting) and self._may_enter(step):
            request = self.waiting[at]
            prefix = self._place(_tokens_of(request), self._final_len(request), None, step)
            if prefix is not None:
                self._enter(self._start(at), prefix, step)
                num_admitted += 1
            elif at < self._policy.look_ahead and self._head_skips < _MAX_SKIPS:
                at += 1
            else:
                break
        is_prefilling = any(step.rest(sequence) > 1 for sequence in self.running)
        if not num_admitted and self.waiting and self._may_enter(step) and not is_prefilling:
            self._blocked_room = self.blocks.room - step.reserved

    def _start(self, at: int) -> Sequence:
        """Makes the waiting row at place `at` a sequence."""
        sequence = Sequence(self.waiting[at], self._arrivals)
        del self.waiting[at]
        sequence.is_last_reader = at == 0
        self._head_skips = self._head_skips + 1 if at else 0
        self._arrivals += 1
        self._neighbour = sequence
        self.counters.prompt_tokens += sequence.prompt_len
        return sequence

    def _may_enter(self, step: _Step) -> bool:
        has_budget = step.budget > 0 or not self._policy.admits_while_running
        return has_budget and len(self.running) < self.config.max_num_seqs

    def _place(self, tokens: TokenIds, final_len: int, num_swapped: int | None, step: _Step) -> Prefix | None:
        """The prefix a row would start from if it can enter now: its expected blocks fit, and nobody computes at
        this moment what it could share. `num_swapped` tokens wait on the host; None: none."""
        prefix = self.blocks.tree.match(tokens, len(tokens) - 1 if num_swapped is None else num_swapped)
        if num_swapped is None:
            prefix = self._closer(prefix, tokens, step)
            if self._must_wait(tokens, prefix.num_tokens(self.config.block_size), step):
                return None
        needed = self.blocks.blocks_for(final_len) - self.blocks.held(prefix)
        return prefix if not self.running or needed <= self.blocks.room - step.reserved else None

    def _closer(self, prefix: Prefix, tokens: TokenIds, step: _Step) -> Prefix:
        """`prefix`, or the same blocks and more tokens out of the last, partly filled block of the neighbour's
        prompt, which is not in the tree."""
        neighbour = self._neighbour
        if neighbour is None or not neighbour.block_table or not self.config.prefix_caching:
            return prefix
        start = len(prefix.nodes) * self.config.block_size
        placed = min(neighbour.num_computed + step.counts.get(neighbour, 0), neighbour.prompt_len)
        shared = min(common_len(tokens[:-1], neighbour.tokens[:placed]) - start, self.config.block_size)
        if shared <= prefix.partial_len:
            return prefix
        return Prefix(prefix.nodes, neighbour.block_table[len(prefix.nodes)], shared)

    def _must_wait(self, tokens: TokenIds, num_matched: int, step: _Step) -> bool:
        """Whether a running prompt will soon hold more of these tokens, or is a long one and so is this."""
        if not self._policy.admits_while_running:
            return False
        for other in self.running:
            rest = step.rest(other)
            if rest <= 1:
                continue
            if self._policy.shares_with_long and self._is_long(rest) and self._is_long(len(tokens) - num_matched):
                return True
            soon = num_matched + self.config.block_size
            if other.node is not None and common_len(tokens, other.tokens[: other.prompt_len]) >= soon:
                return True
        return False

    def _enter(self, sequence: Sequence, prefix: Prefix, step: _Step) -> None:
        """Makes a sequence run from `prefix` on, or from what the host kept of it."""
        self.blocks.attach(sequence, prefix)
        if sequence.swapped is None:
            step.copy(self.blocks.copy_partial(sequence, prefix))
        elif (back := self.blocks.swap_in(sequence, sequence.swapped)) is not None:
            step.swap_ins.append(back)
        if sequence.is_last_reader:
            self.blocks.tree.mark_last_reader(sequence.node, sequence.request.keep_len)
        if sequence.num_preemptions:
            self.counters.recomputed_tokens += max(0, sequence.num_lost - sequence.num_computed)
        else:
            sequence.cached_tokens = min(sequence.num_computed, sequence.prompt_len)
            self.counters.cached_tokens += sequence.cached_tokens
        insort(self.running, sequence, key=_arrival)
        self._extend(sequence, self._share(sequence, step), step, may_preempt=False)
        step.reserved += self._still_needed(sequence)

    def _still_needed(self, sequence: Sequence) -> int:
        """Blocks the sequence is expected to ask for until its end."""
        return max(0, self.blocks.lacking(sequence, self._expected_len(sequence)))

    def _expected_len(self, sequence: Sequence) -> int:
        return sequence.prompt_len + self.lengths.expected(sequence.request.sampling, sequence.output_len)

    def _final_len(self, request: Request) -> int:
        return len(request.token_ids) + self.lengths.expected(request.sampling, len(request.output_ids))

    # The end of a row.

    def _ending(
        self, sequence: Sequence, token: int, find_stop: FindStop
    ) -> tuple[FinishReason, str | int | None] | None:
        """Why the row ends with `token`, and the stop string or token behind it; None when it goes on."""
        sampling, output_len = sequence.request.sampling, len(sequence.output_ids)
        if output_len >= sampling.min_tokens:
            if token in self.config.eos_token_ids and not sampling.ignore_eos:
                return "stop", None
            if token in sampling.stop_token_ids:
                return "stop", token
            stop = find_stop(sequence) if sampling.stop else None
            if stop is not None:
                return "stop", stop
        return ("length", None) if output_len >= sampling.max_tokens else None

    def _finish(
        self, sequence: Sequence, reason: FinishReason, stop: str | int | None, error: RowError | None = None
    ) -> Completion:
        if sequence in self.preempted:  # by the step after the one that turned out to be its last
            self.preempted.remove(sequence)
            self.blocks.forget_swapped(sequence)
        else:
            self.running.remove(sequence)
        self.blocks.release(sequence)
        sequence.is_finished = True
        if error is None:
            self.lengths.observe(len(sequence.output_ids))
        self.counters.rows_finished += 1
        self._blocked_room = None
        return Completion(
            row_idx=sequence.request.row_idx,
            token_ids=tuple(sequence.output_ids.tolist()),
            finish_reason=reason,
            stop_reason=stop,
            prompt_tokens=sequence.prompt_len,
            error=error,
        )

    def _count_step(self, batch: ScheduledBatch) -> None:
        counters = self.counters
        counters.steps += 1
        for item in batch.items:
            counters.computed_tokens += item.num_tokens
            counters.computed_prompt_tokens += max(0, min(item.end, item.sequence.prompt_len) - item.start)
        counters.slot_steps += self.config.max_num_seqs
        counters.busy_slot_steps += len(batch.items)
        for sequence in self.running:
            counters.allocated_token_steps += len(sequence.block_table) * self.config.block_size
            counters.used_token_steps += sequence.num_computed

    def _describe(self) -> str:
        return (
            f"{len(self.running)} running, {len(self.preempted)} preempted, {len(self.waiting)} waiting, "
            f"{self.blocks.pool.num_free} of {self.config.num_blocks} blocks free, "
            f"{self.blocks.tree.num_evictable} evictable"
        )

    def check(self) -> None:
        """States every invariant between two steps; for tests."""
        self.blocks.check(self.running, self.preempted)
        for sequences in (self.running, self.preempted):
            arrivals = [sequence.arrival for sequence in sequences]
            assert arrivals == sorted(set(arrivals)), "not ordered by arrival"


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival


def _tokens_of(request: Request) -> TokenIds:
    """Prompt and the output from before a resume."""
    if not request.output_ids:
        return request.token_ids
    return np.concatenate([request.token_ids, np.array(request.output_ids, dtype=np.int32)])
