"""Decides every step: which tokens of which sequences are computed, who enters, and who has to make room.

There are no phases. A step spends a budget of tokens on closing the gap between what a sequence has and what is
computed of it. It counts as done once it is scheduled: the next one may be scheduled before its tokens are known.
Knows token ids and integers; no tensor, text, clock or randomness. Work per step is O(running + admitted), whatever
waits. Iteration-level scheduling follows Orca (Yu et al., OSDI 2022, section 3), paged blocks vLLM (Kwon et al., SOSP
2023, section 4).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from batchrun.engine.admission import Admission
from batchrun.engine.beam_rows import BeamRows
from batchrun.engine.block_manager import BlockManager
from batchrun.engine.endings import Ending, FindStop, ending_of, failure_of
from batchrun.engine.lane import Lane
from batchrun.engine.lengths import OutputLengths
from batchrun.engine.next_step import NextStep
from batchrun.engine.policies import Schedule, make_policy
from batchrun.engine.preemption import Costs, Preemption
from batchrun.engine.request import Completion, Request, TokenLogprob
from batchrun.engine.running import Running
from batchrun.engine.sequence import Sequence
from batchrun.engine.speculation import Speculation
from batchrun.engine.statistics import Counters, Statistics
from batchrun.engine.step import NO_TOKEN, Item, Sampled, ScheduledBatch, SwapOut
from batchrun.errors import EngineFailed, RowError

_ERROR = Ending("error")
_NOT_FINITE = RowError("engine_error", "the model's logits are not finite; try --dtype float32 or bfloat16")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """`num_blocks` of `block_size` tokens, `num_host_slots` of the same size, and the limits of a step.

    Prompts are cut at multiples of `chunk_alignment_tokens`. Those with more than `long_row_tokens` to compute are
    long; None: those that do not fit a step. A model with states has `num_state_slots` for them; its sequences share no
    prefixes and get no drafts.
    """

    num_blocks: int
    num_host_slots: int
    block_size: int
    block_bytes: int
    max_num_seqs: int
    max_num_batched_tokens: int
    eos_token_ids: frozenset[int]
    schedule: Schedule = "chunked"
    preemption: Preemption = "auto"
    shares_prefixes: bool = True
    chunk_alignment_tokens: int = 1
    long_row_tokens: int | None = None
    num_free_tokens: int = 0
    num_state_slots: int = 0


class Scheduler:
    """Puts steps together and takes in what came of them."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.blocks = BlockManager(
            config.num_blocks,
            config.num_host_slots,
            config.block_size,
            shares_prefixes=config.shares_prefixes,
            num_state_slots=config.num_state_slots,
        )
        self.lengths = OutputLengths()
        self.costs = Costs(bytes_per_token=config.block_bytes / config.block_size)
        self.counters = Counters()
        self.running = Running(self.blocks, config.preemption, self.costs, self.counters)
        self.admission = Admission(self.running, self.blocks, self.lengths, self.counters, config.max_num_seqs)
        self._beam_rows = BeamRows(self.running, self.blocks, self.counters, config.eos_token_ids)
        self._policy = make_policy(config.schedule, Lane(config.long_row_tokens or config.max_num_batched_tokens))
        # What a wrong guess has done to a state cannot be taken back.
        num_free_tokens = 0 if config.num_state_slots else config.num_free_tokens
        self.speculation = Speculation(num_free_tokens, self.counters)
        self._budget = config.max_num_batched_tokens

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.admission.has_rows)

    @property
    def capacity(self) -> int:
        """Tokens the whole pool can hold."""
        return self.config.num_blocks * self.config.block_size

    def most_tokens(self, request: Request) -> int:
        """Tokens of the pool that a row takes at most, in whole blocks."""
        num_forks = request.num_sequences - 1
        return self.config.block_size * self.blocks.blocks_of_row(len(request.token_ids), request.max_len, num_forks)

    @property
    def begun(self) -> tuple[Sequence, ...]:
        """The sequences that run or will run again."""
        return (*self.running, *self.admission.preempted)

    @property
    def num_preempted(self) -> int:
        """Sequences that run no more, or not yet, and have begun."""
        return len(self.admission.preempted)

    @property
    def needs_known_tokens(self) -> bool:
        """Whether a step must not be scheduled while tokens are pending: a running row's sampling looks at them."""
        return any(sequence.request.needs_known_tokens for sequence in self.running)

    def add(self, request: Request) -> None:
        """Queues a row, in plan order. It must fit the pool and a step at its longest, with all its beams."""
        assert self.most_tokens(request) <= self.capacity, (request.row_idx, request.max_len, self.capacity)
        assert request.num_sequences <= self.config.max_num_seqs, "a row with more beams than a step may have"
        self.admission.add(request)

    def take_over(self, request: Request, host_slots: tuple[int, ...]) -> None:
        """Has a row run of which another engine has computed all tokens but the last, into these host slots."""
        self.admission.take_over(request, host_slots)

    def hand_over(self, sequence: Sequence, host_slots: tuple[int, ...]) -> SwapOut:
        """Ends a running sequence here, of which all known tokens but the last are computed: for another engine its
        blocks are to be copied to these host slots, before the next step is launched."""
        blocks = tuple(sequence.block_table)
        assert len(blocks) == len(host_slots), f"{len(blocks)} blocks for {len(host_slots)} host slots"
        self.drop(sequence)
        return SwapOut(blocks, host_slots)

    def schedule(self) -> ScheduledBatch:
        """The next step; empty when all depends on tokens that are pending.

        Raises:
            EngineFailed: nothing can be scheduled although work remains; a bug, with the state in the message.
        """
        step = NextStep(self.blocks, self._budget, self.config.chunk_alignment_tokens)
        self._policy.fill(step, self.running, self.admission)
        self.speculation.extend(step)
        if step.preempted:
            self.admission.put_back(step.preempted[0])
        batch = step.freeze()
        if not batch.items and not any(sequence.has_pending or sequence.is_full for sequence in self.begun):
            raise EngineFailed(f"no sequence can be scheduled: {self.description}")
        self.blocks.unpin()
        self._advance(batch)
        return batch

    def _advance(self, batch: ScheduledBatch) -> None:
        """From here on the step's tokens are computed, for all that is scheduled after it."""
        for item in batch.items:
            item.sequence.num_computed = item.end
            item.sequence.read_end = max(item.sequence.read_end, item.end)
            if item.samples:
                item.sequence.expect()
        self.counters.swapped_bytes += batch.num_swapped * self.config.block_bytes

    def update(self, batch: ScheduledBatch, sampled: Sampled, find_stop: FindStop) -> list[Completion]:
        """Takes in a step's tokens; the rows that are finished by them. `find_stop` sees each extended sequence.

        Steps come in the order in which they were scheduled. A row that had ended before this step was, when nobody
        knew it yet, scheduled once more: its token is dropped.
        """
        completions = []
        logprobs: Iterable[TokenLogprob | None] = sampled.logprobs or repeat(None, len(sampled.tokens))
        tokens = zip(sampled.tokens.tolist(), logprobs, strict=True)
        for item in batch.items:
            chosen = [next(tokens) for _ in item.choices]
            if chosen and not item.sequence.is_finished:
                is_beam = item.sequence.request.beams is not None
                completion = self._hear(item, *chosen) if is_beam else self._take(item, chosen, find_stop)
                completions += [completion] if completion is not None else []
        for item, reading in zip(batch.items, sampled.readings, strict=bool(sampled.readings)):
            if len(reading) and not item.sequence.is_finished:
                completion = self._take_reading(item, reading)
                completions += [completion] if completion is not None else []
        self._count_step(batch)
        if sampled.was_split:
            self._budget = max(1, self._budget // 2)
        return completions

    def _take(
        self, item: Item, chosen: list[tuple[int, TokenLogprob | None]], find_stop: FindStop
    ) -> Completion | None:
        """The tokens chosen behind an item become its sequence's, up to the first that its draft had not guessed."""
        sequence, completion, num_right = item.sequence, None, 0
        for token, logprob in chosen:
            if token == NO_TOKEN:
                completion = self._finish(sequence, _ERROR, failure_of(sequence) or _NOT_FINITE)
                break
            is_guessed = sequence.is_guessed(token)
            sequence.resolve(token)
            if logprob is not None:
                sequence.logprobs.append(logprob)
            self.counters.output_tokens += 1
            if (failure := failure_of(sequence)) is not None:
                completion = self._finish(sequence, _ERROR, failure)
                break
            ending = ending_of(sequence, token, find_stop, self.config.eos_token_ids)
            if ending is not None:
                completion = self._finish(sequence, ending)
                break
            if not is_guessed:
                break
            num_right += 1
        if item.num_draft:
            self.speculation.learn(sequence, num_right, item.num_draft)
            if completion is None:
                sequence.drop_draft()
                self.blocks.shrink(sequence)
        return completion

    def _hear(self, item: Item, chosen: tuple[int, TokenLogprob | None]) -> Completion | None:
        """What may follow a beam; its row ends when that ends the search."""
        token, logprob = chosen
        if token == NO_TOKEN or logprob is None:
            return self._finish(item.sequence, _ERROR, _NOT_FINITE)
        found = self._beam_rows.hear(item.sequence, logprob)
        if found is None:
            return None
        self.counters.output_tokens += len(found.token_ids)
        return replace(self._finish(item.sequence, found.ending), token_ids=found.token_ids)

    def _take_reading(self, item: Item, reading: NDArray[np.float64]) -> Completion | None:
        """What was read in an item becomes its sequence's, which ends with its last token."""
        sequence = item.sequence
        if not np.isfinite(reading).all():
            return self._finish(sequence, _ERROR, _NOT_FINITE)
        sequence.take(reading, item.end)
        return self._finish(sequence, Ending("length")) if item.end == sequence.num_tokens else None

    def start_over(self) -> tuple[Sequence, ...]:
        """Keys and values are lost: every begun sequence waits to be computed again. They are returned."""
        begun = self.begun
        for sequence in self.admission.preempted:
            self.blocks.forget_swapped(sequence)
            sequence.forget_flight()
        for row in self.running.rows:
            self.running.leave(row)
            for sequence in row:
                sequence.start_over()
            self.admission.put_back(row[0])
        self.blocks.tree.clear()
        return begun

    def fail(self, sequence: Sequence, error: RowError) -> Completion:
        """Ends a begun sequence that cannot go on."""
        return self._finish(sequence, _ERROR, error)

    def statistics(self) -> Statistics:
        """A snapshot of counters and gauges."""
        return Statistics(
            counters=replace(self.counters),
            num_running=len(self.running),
            num_waiting=self.admission.num_waiting,
            num_preempted=self.num_preempted,
            num_nodes=self.blocks.tree.num_nodes,
            kv_usage=self.blocks.num_in_use / max(self.config.num_blocks, 1),
            kv_peak=self.blocks.most_in_use / max(self.config.num_blocks, 1),
        )

    def _finish(self, sequence: Sequence, ending: Ending, error: RowError | None = None) -> Completion:
        for one in (sequence, *self._beam_rows.end(sequence)):
            self.drop(one)
        self.speculation.forget(sequence)
        reads = sequence.request.reads is not None
        if error is None and not reads:
            self.lengths.observe(len(sequence.output_ids))
        self.counters.rows_finished += 1
        return Completion(
            row_idx=sequence.request.row_idx,
            token_ids=tuple(sequence.output_ids.tolist()),
            finish_reason=ending.reason,
            stop_reason=ending.stop,
            prompt_tokens=sequence.prompt_len,
            error=error,
            logprobs=tuple(sequence.logprobs),
            text_len=sequence.text_len if isinstance(ending.stop, str) else None,
            branch=sequence.request.branch,
            readings=sequence.pooled if reads and error is None else None,
        )

    def drop(self, sequence: Sequence) -> None:
        """Forgets a begun sequence, of which nothing more is expected here."""
        if sequence in self.admission.preempted:  # by the step after the one that turned out to be its last
            self.admission.preempted.remove(sequence)
            self.blocks.forget_swapped(sequence)
        elif sequence in self.running:
            self.running.remove(sequence)
        self.blocks.release(sequence)
        sequence.is_finished = True
        self.admission.look_again()

    def _count_step(self, batch: ScheduledBatch) -> None:
        counters = self.counters
        counters.steps += 1
        for item in batch.items:
            counters.computed_tokens += item.num_tokens - item.num_draft
            counters.computed_prompt_tokens += max(0, min(item.end, item.sequence.prompt_len) - item.start)
        counters.slot_steps += self.config.max_num_seqs
        counters.busy_slot_steps += len(batch.items)
        for sequence in self.running:
            counters.allocated_token_steps += len(sequence.block_table) * self.config.block_size
            counters.used_token_steps += sequence.num_computed

    @property
    def description(self) -> str:
        """What runs and waits, and the blocks that are left, in a line."""
        return (
            f"{len(self.running)} running, {len(self.admission.preempted)} preempted, "
            f"{self.admission.num_waiting} waiting, "
            f"{self.blocks.pool.num_free} of {self.config.num_blocks} blocks free, "
            f"{self.blocks.tree.num_evictable} evictable"
        )

    def check(self) -> None:
        """States every invariant between two steps; for tests."""
        self.blocks.check(self.running, self.admission.preempted)
        for sequences in (self.running, self.admission.preempted):
            arrivals = [sequence.arrival for sequence in sequences]
            assert arrivals == sorted(arrivals), "not ordered by arrival"
            rows = {(sequence.arrival, sequence.request.key) for sequence in sequences}
            assert len(rows) == len(set(arrivals)), "rows that arrived at once"
