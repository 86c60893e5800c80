"""Decides every step: which tokens of which sequences are computed, who enters, and who has to make room.

There are no phases. A step spends a budget of tokens on closing the gap between what a sequence has and what is
computed of it. It counts as done once it is scheduled: the next one may be scheduled before its tokens are known.
Knows token ids and integers; no tensor, text, clock or randomness. Work per step is O(running + admitted), whatever
waits. Iteration-level scheduling follows Orca (Yu et al., OSDI 2022, section 3), paged blocks vLLM (Kwon et al., SOSP
2023, section 4).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from batchrun.engine.admission import Admission
from batchrun.engine.block_manager import BlockManager
from batchrun.engine.lane import Lane
from batchrun.engine.lengths import OutputLengths
from batchrun.engine.next_step import NextStep
from batchrun.engine.policies import Schedule, make_policy
from batchrun.engine.preemption import Costs, Preemption
from batchrun.engine.repetition import repeats_itself
from batchrun.engine.request import Completion, FinishReason, Request, TokenLogprob
from batchrun.engine.running import Running
from batchrun.engine.sequence import Sequence
from batchrun.engine.speculation import Speculation
from batchrun.engine.statistics import Counters, Statistics
from batchrun.engine.step import NO_TOKEN, Item, Sampled, ScheduledBatch
from batchrun.errors import EngineFailed, RowError

FindStop = Callable[[Sequence], str | None]

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

    @property
    def begun(self) -> tuple[Sequence, ...]:
        """The sequences that run or will run again."""
        return (*self.running, *self.admission.preempted)

    @property
    def needs_known_tokens(self) -> bool:
        """Whether a step must not be scheduled while tokens are pending: a running row's sampling looks at them."""
        return any(sequence.request.needs_known_tokens for sequence in self.running)

    def add(self, request: Request) -> None:
        """Queues a row, in plan order. Its `max_len` must not exceed `capacity`."""
        assert request.max_len <= self.capacity, (request.row_idx, request.max_len, self.capacity)
        self.admission.add(request)

    def schedule(self) -> ScheduledBatch:
        """The next step; empty when all depends on tokens that are pending.

        Raises:
            EngineFailed: nothing can be scheduled although work remains; a bug, with the state in the message.
        """
        step = NextStep(self.blocks, self._budget, self.config.chunk_alignment_tokens)
        self._policy.fill(step, self.running, self.admission)
        self.speculation.extend(step)
        if step.preempted is not None:
            self.admission.put_back(step.preempted)
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
                completion = self._take(item, chosen, find_stop)
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
                completion = self._finish(sequence, "error", None, _failure(sequence) or _NOT_FINITE)
                break
            is_guessed = sequence.is_guessed(token)
            sequence.resolve(token)
            if logprob is not None:
                sequence.logprobs.append(logprob)
            self.counters.output_tokens += 1
            if (failure := _failure(sequence)) is not None:
                completion = self._finish(sequence, "error", None, failure)
                break
            ending = self._ending(sequence, token, find_stop)
            if ending is not None:
                completion = self._finish(sequence, *ending)
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

    def _take_reading(self, item: Item, reading: NDArray[np.float64]) -> Completion | None:
        """What was read in an item becomes its sequence's, which ends with its last token."""
        sequence = item.sequence
        if not np.isfinite(reading).all():
            return self._finish(sequence, "error", None, _NOT_FINITE)
        sequence.take(reading, item.end)
        return self._finish(sequence, "length", None) if item.end == sequence.num_tokens else None

    def start_over(self) -> tuple[Sequence, ...]:
        """Keys and values are lost: every begun sequence waits to be computed again. They are returned."""
        begun = self.begun
        for sequence in begun:
            if sequence in self.admission.preempted:
                self.blocks.forget_swapped(sequence)
                continue
            self.running.remove(sequence)
            self.blocks.release(sequence)
            sequence.start_over()
            self.admission.put_back(sequence)
        self.blocks.tree.clear()
        return begun

    def fail(self, sequence: Sequence, error: RowError) -> Completion:
        """Ends a begun sequence that cannot go on."""
        return self._finish(sequence, "error", None, error)

    def statistics(self) -> Statistics:
        """A snapshot of counters and gauges."""
        return Statistics(
            counters=replace(self.counters),
            num_running=len(self.running),
            num_waiting=self.admission.num_waiting,
            num_preempted=len(self.admission.preempted),
            num_nodes=self.blocks.tree.num_nodes,
            kv_usage=self.blocks.num_in_use / max(self.config.num_blocks, 1),
        )

    def _ending(
        self, sequence: Sequence, token: int, find_stop: FindStop
    ) -> tuple[FinishReason, str | int | None] | None:
        """Why the row ends with `token`, and the stop string or token behind it; None when it goes on."""
        sampling, output_len = sequence.request.sampling, len(sequence.output_ids)
        # Before min_tokens, too: a stop string that is complete by then does not end the row later.
        stop = find_stop(sequence) if sampling.stop or not sequence.is_answering else None
        if output_len >= sampling.min_tokens:
            if token in self.config.eos_token_ids and not sampling.ignore_eos:
                return "stop", None
            if token in sampling.stop_token_ids and sequence.is_answering:
                return "stop", token
            if stop is not None:
                return "stop", stop
        if sequence.matcher is not None and sequence.matcher.has_ended:
            return "stop", None
        if output_len >= sampling.min_tokens and _repeats(sequence):
            return "repetition", None
        return ("length", None) if output_len >= sampling.max_tokens else None

    def _finish(
        self, sequence: Sequence, reason: FinishReason, stop: str | int | None, error: RowError | None = None
    ) -> Completion:
        if sequence in self.admission.preempted:  # by the step after the one that turned out to be its last
            self.admission.preempted.remove(sequence)
            self.blocks.forget_swapped(sequence)
        else:
            self.running.remove(sequence)
        self.blocks.release(sequence)
        sequence.is_finished = True
        self.speculation.forget(sequence)
        reads = sequence.request.reads is not None
        if error is None and not reads:
            self.lengths.observe(len(sequence.output_ids))
        self.counters.rows_finished += 1
        self.admission.look_again()
        return Completion(
            row_idx=sequence.request.row_idx,
            token_ids=tuple(sequence.output_ids.tolist()),
            finish_reason=reason,
            stop_reason=stop,
            prompt_tokens=sequence.prompt_len,
            error=error,
            logprobs=tuple(sequence.logprobs),
            text_len=sequence.text_len if isinstance(stop, str) else None,
            branch=sequence.request.branch,
            readings=sequence.pooled if reads and error is None else None,
        )

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
            assert arrivals == sorted(set(arrivals)), "not ordered by arrival"


def _failure(sequence: Sequence) -> RowError | None:
    """Why the sequence's grammar cannot say what comes next; None when it can, or there is none."""
    failure = sequence.matcher.failure if sequence.matcher is not None else None
    return None if failure is None else RowError("schema_unsupported", failure)


def _repeats(sequence: Sequence) -> bool:
    """Whether it says one thing as often in a row as its parameters do not want."""
    sampling = sequence.request.sampling
    least, longest = sampling.repetition_min_count, sampling.repetition_max_pattern_size
    return least > 0 and repeats_itself(sequence.output_ids, least, longest)
