"""Two engines, one of which computes the prompts: the answers of thousands of random jobs, whenever it is lost."""

import os
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle

import numpy as np
import pytest

from batchrun.engine.disaggregated import DisaggregatedEngine
from batchrun.engine.echo import EOS_TOKEN_ID, EchoRunner
from batchrun.engine.handover import Prefill, Prefilled, PrefillerLost
from batchrun.engine.host_memory import anonymous
from batchrun.engine.prefill_engine import PrefillEngine
from batchrun.engine.request import Completion, Request, SamplingParams
from batchrun.engine.scheduler import SchedulerConfig
from batchrun.engine.statistics import Counters
from batchrun.engine.step import Ended, ScheduledBatch
from batchrun.errors import EngineFailed
from tests.engine.test_engine_with_echo import expected, random_prompts, requests_of


class InTurns:
    """A `Prefiller` in this process: before it is heard it makes a random number of steps, and may be lost in one."""

    def __init__(self, engine: PrefillEngine, rng: random.Random, lost_after: int | None = None) -> None:
        self.engine = engine
        self.capacity = engine.capacity
        self.ordered: list[Prefill] = []
        self._rng = rng
        self._lost_after = lost_after
        self._num_steps = 0
        self.is_closed = False
        self._said: deque[Prefilled] = deque()

    def order(self, prefills: Sequence[Prefill]) -> None:
        self.ordered += prefills
        for prefill in prefills:
            self.engine.add(prefill)

    def hear(self, *, waits: bool) -> list[Prefilled]:
        assert not waits or self.engine.has_work or self._said, "waits for what nobody does"
        for _ in range(self._rng.choice([0, 1, 1, 3]) or waits):
            if self.engine.has_work:
                if self._num_steps == self._lost_after:
                    raise PrefillerLost("was ended by SIGKILL")
                self._num_steps += 1
                self._said.append(self.engine.step())
                self.engine.check()
        num = len(self._said) if waits else self._rng.randint(0, len(self._said))
        return [self._said.popleft() for _ in range(num)]

    def close(self) -> None:
        self.is_closed = True


def make(rng: random.Random, num_blocks: int, num_host_slots: int, block_size: int = 4, **options):
    """The engine and its prefiller; runners share host slots, the prefiller's pool may be smaller."""
    lost_after, poison = options.pop("lost_after", None), options.pop("poison", None)
    num_prefill_blocks = options.pop("num_prefill_blocks", num_blocks)
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "eos_token_ids": frozenset({EOS_TOKEN_ID})} | options
    mean_output_len, overlaps = settings.pop("mean_output_len", 12), settings.pop("overlaps", False)
    descriptor = anonymous(num_host_slots * block_size * 8) if num_host_slots else None
    runners = [
        EchoRunner(num, block_size, num_host_slots, mean_output_len, overlaps=over, swap_descriptor=descriptor)
        for num, over in ((num_blocks, overlaps), (num_prefill_blocks, False))
    ]
    if descriptor is not None:
        os.close(descriptor)
    config = SchedulerConfig(num_blocks, num_host_slots, block_size, runners[0].block_bytes, **settings)
    prefilling = PrefillEngine(
        replace(config, num_blocks=num_prefill_blocks), runners[1] if poison is None else Poisoned(runners[1], poison)
    )
    prefiller = InTurns(prefilling, rng, lost_after)
    return DisaggregatedEngine(config, runners[0], lambda ids: "".join(map(chr, ids)), prefiller), prefiller


class Poisoned:
    """A runner that raises for a step with one of these rows."""

    def __init__(self, runner: EchoRunner, rows: set[int]) -> None:
        self._runner = runner
        self._rows = rows

    def launch(self, batch: ScheduledBatch) -> Ended:
        if any(item.sequence.request.row_idx in self._rows for item in batch.items):
            raise ValueError("a spoiled row")
        return self._runner.launch(batch)

    def __getattr__(self, name: str):
        return getattr(self._runner, name)


class Clumsy(Poisoned):
    """A runner that raises for some of the steps with copies to the host."""

    def __init__(self, runner: EchoRunner, fails: Callable[[], bool]) -> None:
        super().__init__(runner, set())
        self._fails = fails

    def launch(self, batch: ScheduledBatch) -> Ended:
        if batch.swap_outs and self._fails():
            raise RuntimeError("no copy")
        return super().launch(batch)


class Counted(Poisoned):
    """A runner that counts how often its copies are waited for."""

    num_waits = 0

    def wait_for_copies(self) -> None:
        self.num_waits += 1


def run(engine: DisaggregatedEngine, requests: list[Request], *, at_a_time: int = 1000) -> dict[int, Completion]:
    done: dict[int, Completion] = {}
    waiting = deque(requests)
    while engine.has_work or waiting:
        while waiting and engine.num_waiting < at_a_time:
            engine.add(waiting.popleft())
        for completion in engine.step():
            assert completion.row_idx not in done, "a row finished twice"
            done[completion.row_idx] = completion
        engine.check()
    return done


def random_job(seed: int) -> tuple[Counters, int]:
    """One random job against the oracle; its counters, and how many rows were computed ahead."""
    rng = random.Random(seed)
    prompts = random_prompts(rng, rng.randint(1, 24), vocab=rng.choice([4, 6, 200]))
    samplings = [
        SamplingParams(max_tokens=rng.randint(1, rng.choice([1, 10, 60])), ignore_eos=rng.random() < 0.1)
        for _ in prompts
    ]
    requests = requests_of(prompts, samplings)
    block_size = rng.choice([1, 3, 4, 16])
    fewest = -(-max(request.max_len for request in requests) // block_size)
    mean_output_len = rng.choice([4, 1000])
    # Some go on from tokens of an earlier run.
    resumed = [_resumed(request, rng, mean_output_len) if rng.random() < 0.2 else request for request in requests]
    engine, prefiller = make(
        rng,
        fewest + rng.choice([0, 1, 2, 4, 60]),
        num_host_slots=rng.choice([0, 1, 5, 12, 200]),
        block_size=block_size,
        num_prefill_blocks=max(1, fewest + rng.choice([-3, 0, 1, 60])),
        mean_output_len=mean_output_len,
        max_num_seqs=rng.choice([1, 4, 32]),
        max_num_batched_tokens=rng.choice([1, 7, 16, 63, 500]),
        schedule=rng.choice(["chunked", "chunked", "prefill-first", "fcfs", "static"]),
        chunk_alignment_tokens=rng.choice([1, 1, 3]),
        long_row_tokens=None,
        preemption=rng.choice(["auto", "recompute", "swap", "swap"]),
        shares_prefixes=rng.random() < 0.8,
        overlaps=rng.random() < 0.5,
        lost_after=rng.choice([None, None, rng.randint(0, 30)]),
        poison={rng.randrange(len(requests))} if rng.random() < 0.2 else None,
    )
    done = run(engine, resumed, at_a_time=rng.choice([1, 5, 1000]))
    assert {row_idx: list(completion.token_ids) for row_idx, completion in done.items()} == {
        request.row_idx: expected(request, mean_output_len) for request in requests
    }
    statistics = engine.statistics()
    assert statistics.kv_usage == 0.0, "blocks are still referenced after the last row"
    blocks = engine.scheduler.blocks
    assert blocks.num_free_host_slots == blocks.num_host_slots, "host slots are lost"
    assert engine.latencies().first_token.count == sum(not request.output_ids for request in resumed)
    return statistics.counters, len(prefiller.ordered)


def _resumed(request: Request, rng: random.Random, mean_output_len: int) -> Request:
    answer = expected(request, mean_output_len)
    return replace(request, output_ids=tuple(answer[: rng.randint(0, max(0, len(answer) - 1))]))


@pytest.mark.parametrize("block_of_seeds", range(8))
def test_random_jobs_answer_like_the_model_alone(block_of_seeds: int) -> None:
    """Pools and host slots that are too small, preemption in both engines, rows that fail in one of them, a prefiller
    that is lost at any step, rows that are resumed: the same tokens, and no block or slot is left behind."""
    jobs = [random_job(seed) for seed in range(block_of_seeds * 250, (block_of_seeds + 1) * 250)]
    assert sum(num_ordered for _, num_ordered in jobs) > 1000
    counters = [counted for counted, _ in jobs]
    assert sum(counter.cached_tokens for counter in counters) > 0
    assert sum(counter.recompute_preemptions for counter in counters) > 0
    assert sum(counter.swap_preemptions for counter in counters) > 0


def test_a_row_is_computed_once_and_counted_once() -> None:
    """All of the prompt but its last token elsewhere, that one here."""
    prompts = [[row, *range(10, 10 + 5 * row)] for row in range(3, 11)]
    requests = requests_of(prompts, [SamplingParams(max_tokens=5, ignore_eos=True)] * len(prompts))
    engine, prefiller = make(random.Random(1), 200, 200)
    run(engine, requests)
    counters, num_tokens = engine.statistics().counters, sum(map(len, prompts))
    assert (counters.prompt_tokens, counters.computed_prompt_tokens) == (num_tokens, num_tokens)
    assert (counters.cached_tokens, counters.recomputed_tokens, counters.preemptions) == (0, 0, 0)
    assert (counters.output_tokens, counters.rows_finished) == (5 * len(prompts), len(prompts))
    assert prefiller.engine.scheduler.counters.computed_tokens == num_tokens - len(prompts)


def test_rows_that_wait_are_given_back_and_those_ahead_end() -> None:
    """As when a job is asked to stop."""
    requests = requests_of([[row, 7, 8, 9] for row in range(3, 23)], [SamplingParams(max_tokens=4)] * 20)
    engine, _ = make(random.Random(1), 200, 200, max_num_seqs=3)
    for request in requests:
        engine.add(request)
    engine.step()
    given_back = {request.row_idx for request in engine.stop_admitting()}
    begun = {row.row_idx for row in engine.in_flight()}
    assert given_back
    assert begun
    assert given_back.isdisjoint(begun)
    done = run(engine, [])
    assert given_back | {*done} == set(range(20))
    assert {row: list(done[row].token_ids) for row in done} == {row: expected(requests[row]) for row in done}


def test_a_row_at_fault_fails_once_and_the_others_are_answered() -> None:
    """The prefiller leaves the rows of its step to the engine, which finds the one that fails alone."""
    requests = requests_of([[row, 7, 8, 9] for row in range(3, 15)], [SamplingParams(max_tokens=4)] * 12)
    engine, prefiller = make(random.Random(1), 200, 200, poison={5})
    engine._runner = Poisoned(engine._runner, {5})
    done = run(engine, requests)
    assert {row for row, completion in done.items() if completion.error is not None} == {5}
    assert {row: list(done[row].token_ids) for row in done if row != 5} == {
        row: expected(requests[row]) for row in done if row != 5
    }
    assert len(prefiller.ordered) == 12


def test_rows_whose_copies_fail_are_not_lost() -> None:
    """What was computed of them is, and the prefiller knows nothing of them any more."""
    rng = random.Random(4)
    requests = requests_of([[row, *range(7, 7 + row)] for row in range(3, 33)], [SamplingParams(max_tokens=4)] * 30)
    engine, prefiller = make(rng, 200, 200)
    prefiller.engine._runner = Clumsy(prefiller.engine._runner, cycle([True, False]).__next__)
    done = run(engine, requests)
    assert {row: list(done[row].token_ids) for row in done} == {row: expected(requests[row]) for row in range(30)}
    blocks = engine.scheduler.blocks
    assert blocks.num_free_host_slots == blocks.num_host_slots
    assert not prefiller.engine.has_work


def test_a_prefiller_whose_steps_all_fail_says_so() -> None:
    """Else the job would go on without one, and nobody would know."""
    _, prefiller = make(random.Random(1), 200, 200, poison=set(range(9)))
    for row in range(2):
        prefiller.order([Prefill.of(requests_of([[3, 4, 5]], [SamplingParams()])[0], (row,))])
        assert prefiller.engine.step().failed == ((0, 0),)
    prefiller.order([Prefill.of(requests_of([[3, 4, 5]], [SamplingParams()])[0], (2,))])
    with pytest.raises(EngineFailed, match="steps fail one after another: ValueError: a spoiled row"):
        prefiller.engine.step()


def test_copies_are_waited_for_when_slots_are_lent_only() -> None:
    """A device would be idle meanwhile."""
    requests = requests_of([[row, 7, 8, 9] for row in range(3, 23)], [SamplingParams(max_tokens=40)] * 20)
    engine, prefiller = make(random.Random(1), 200, 200, max_num_seqs=2)
    runner = engine._runner = Counted(engine._runner, set())
    run(engine, requests)
    assert 0 < runner.num_waits <= len(prefiller.ordered) == 20


def test_a_prompt_is_counted_once_also_where_it_is_computed_twice() -> None:
    """Rows that were with a prefiller that was lost."""
    prompts = [[row, *range(10, 10 + 5 * row)] for row in range(3, 23)]
    for seed in range(20):
        engine, _ = make(random.Random(seed), 400, 400, lost_after=2 + seed % 5)
        run(engine, requests_of(prompts, [SamplingParams(max_tokens=5, ignore_eos=True)] * len(prompts)))
        assert engine.statistics().counters.prompt_tokens == sum(map(len, prompts))


def test_a_row_that_is_with_the_prefiller_waits() -> None:
    """The batch has places for 3 rows, and no more can run."""
    requests = requests_of([[row, 7, 8, 9] for row in range(3, 23)], [SamplingParams(max_tokens=30)] * 20)
    engine, _ = make(random.Random(2), 200, 200, max_num_seqs=3)
    for request in requests:
        engine.add(request)
    num_done = 0
    while engine.has_work:
        num_done += len(engine.step())
        now = engine.statistics()
        assert now.num_running <= 3
        assert now.num_running + now.num_preempted + now.num_waiting == 20 - num_done


def test_a_lost_prefiller_is_closed() -> None:
    """Its share of the machine is this engine's then."""
    engine, prefiller = make(random.Random(1), 200, 200, lost_after=1)
    run(engine, requests_of([[row, 7, 8, 9] for row in range(3, 23)], [SamplingParams(max_tokens=4)] * 20))
    assert prefiller.is_closed


def test_a_prefill_is_of_all_known_tokens_but_the_last() -> None:
    def known(**given) -> tuple[list[int], tuple[int, ...]]:
        request = Request(4, np.array([5, 6, 7], np.int32), SamplingParams(stop=("x",)), keep_len=3, **given)
        made = Prefill.of(request, (1,)).request
        assert made.max_len <= 3 + len(given.get("output_ids", ())) + 2
        return made.token_ids.tolist(), made.output_ids

    assert known() == ([5, 6], ())
    assert known(output_ids=(8,)) == ([5, 6, 7], ())
    assert known(output_ids=(8, 9)) == ([5, 6, 7], (8,))
