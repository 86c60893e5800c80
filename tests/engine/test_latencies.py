"""What the engine measures of its rows' waiting, by a clock that goes on a second a step."""

import numpy as np
import pytest

from batchrun.engine.echo import EOS_TOKEN_ID, EchoRunner
from batchrun.engine.engine import Engine
from batchrun.engine.request import Request, SamplingParams, TokenLogprobs
from batchrun.engine.scheduler import SchedulerConfig
from batchrun.latency import Latencies


class SteppedClock:
    """A second passes with every step that a runner launches."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s

    def watch(self, runner):
        launch = runner.launch

        def timed(batch):
            self.now_s += 1.0
            return launch(batch)

        runner.launch = timed
        return runner


def make_engine(clock, *, num_blocks=60, mean_output_len=24, overlaps=False, **options):
    runner = EchoRunner(num_blocks, 4, mean_output_len=mean_output_len, overlaps=overlaps)
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 16} | options
    config = SchedulerConfig(
        num_blocks=num_blocks,
        num_host_slots=0,
        block_size=4,
        block_bytes=runner.block_bytes,
        eos_token_ids=frozenset({EOS_TOKEN_ID}),
        **settings,
    )
    return Engine(config, clock.watch(runner), decode=lambda ids: "", clock=clock)


def request(row_idx, prompt_len, max_tokens, *, ignore_eos=True, **options):
    tokens = np.arange(10 + 100 * row_idx, 10 + 100 * row_idx + prompt_len, dtype=np.int32)
    return Request(row_idx, tokens, SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos), **options)


def finish(engine):
    while engine.has_work:
        engine.step()
        engine.check()
    return engine.latencies()


def test_the_slowest_rows_are_known_with_their_lengths_and_waits():
    engine = make_engine(SteppedClock(), max_num_seqs=2, max_num_batched_tokens=64)
    lengths = [3, 1, 9, 2, 11, 5, 6, 8, 4, 7, 12, 10]
    for row_idx, length in enumerate(lengths):
        engine.add(request(row_idx, 4 + row_idx, length))
    finish(engine)
    slowest = engine.slowest_rows()
    assert [row.output_tokens for row in slowest] == [12, 11, 10, 9, 8, 7, 6, 5, 4, 3]
    assert [row.run_s for row in slowest] == [float(row.output_tokens) for row in slowest]
    assert {row.row_idx: row.prompt_tokens for row in slowest} == {row.row_idx: 4 + row.row_idx for row in slowest}
    assert {row.row_idx: row.queue_s for row in slowest}[0] == 0.0
    assert min(row.queue_s for row in slowest if row.row_idx > 1) >= 1.0


def of(**seconds):
    """Latencies of these durations."""
    found = Latencies()
    for name, durations in seconds.items():
        for one in durations:
            getattr(found, name).add(one)
    return found


def test_a_row_is_timed_from_its_arrival_and_its_tokens_from_each_other():
    """Row 1 has no place until row 0 is done; row 2 comes later and waits for row 1."""
    clock = SteppedClock()
    engine = make_engine(clock, max_num_seqs=1)
    engine.add(request(0, 20, 3))
    engine.add(request(1, 2, 2))
    engine.step()
    engine.add(request(2, 2, 1))
    # Row 0 runs in steps 1 to 4 (its prompt is cut in two), row 1 in 5 and 6, row 2 in 7.
    assert finish(engine) == of(queue=[0, 4, 5], first_token=[2, 5, 6], per_token=[1, 1, 1])


def test_decodes_that_wait_for_a_prompt_have_had_a_long_time_per_token():
    """The same rows under two policies: row 1 arrives when row 0 decodes, and needs three steps."""
    measured = {}
    for schedule in ("chunked", "fcfs"):
        clock = SteppedClock()
        engine = make_engine(clock, schedule=schedule)
        engine.add(request(0, 4, 8))
        engine.step()
        engine.add(request(1, 45, 1))
        measured[schedule] = finish(engine)
    assert measured["chunked"] == of(queue=[0, 0], first_token=[1, 3], per_token=[1] * 7)
    assert measured["fcfs"] == of(queue=[0, 0], first_token=[1, 3], per_token=[4, *[1] * 6])


def test_a_resumed_row_has_had_its_first_token_and_the_wait_before_it():
    """The wait in the queue was measured once more, so that percentiles that stand side by side were of other rows."""
    clock = SteppedClock()
    engine = make_engine(clock)
    engine.add(request(0, 4, 5, output_ids=(7, 7)))
    assert finish(engine) == of(per_token=[1, 1])


def test_waits_are_of_rows_that_got_their_first_token():
    """A row that has begun when a job stops is measured when it runs again, and not twice."""
    clock = SteppedClock()
    engine = make_engine(clock)
    engine.add(request(0, 40, 2))
    engine.step()
    assert engine.latencies() == of()
    assert finish(engine) == of(queue=[0], first_token=[3], per_token=[1])


def test_rows_that_are_only_read_have_a_wait_and_no_first_token():
    engine = make_engine(SteppedClock(), max_num_seqs=1)
    for row_idx in range(2):
        reads = TokenLogprobs(np.arange(3, dtype=np.int32), np.arange(3, dtype=np.int32))
        engine.add(request(row_idx, 4, 0, reads=reads))
    assert finish(engine) == of(queue=[0, 1])


def test_the_time_away_of_a_preempted_row_counts():
    clock = SteppedClock()
    engine = make_engine(clock, num_blocks=8, mean_output_len=10**9)
    for row_idx in range(2):
        engine.add(request(row_idx, 6, 14, ignore_eos=False))
    latencies = finish(engine)
    statistics = engine.statistics()
    assert statistics.counters.preemptions > 0
    assert latencies.first_token.count == 2
    assert latencies.per_token.count == statistics.counters.output_tokens - 2
    assert latencies.per_token.percentile(100) > 2


@pytest.mark.parametrize("overlaps", [False, True])
def test_every_token_counts_once(overlaps):
    """A step that was launched before its row was known to have ended adds nothing."""
    clock = SteppedClock()
    engine = make_engine(clock, overlaps=overlaps)
    for row_idx in range(30):
        engine.add(request(row_idx, 1 + row_idx % 9, 40, ignore_eos=False))
    latencies, counters = finish(engine), engine.statistics().counters
    assert latencies.queue.count == latencies.first_token.count == 30
    assert latencies.per_token.count == counters.output_tokens - 30


def test_rows_that_are_taken_back_leave_nothing_behind():
    clock = SteppedClock()
    engine = make_engine(clock, max_num_seqs=1)
    for row_idx in range(3):
        engine.add(request(row_idx, 3, 2))
    engine.step()
    assert [row.row_idx for row in engine.stop_admitting()] == [1, 2]
    assert finish(engine) == of(queue=[0], first_token=[1], per_token=[1])
    for row_idx in (1, 2):
        engine.add(request(row_idx, 3, 1))
    assert finish(engine) == of(queue=[0, 0, 1], first_token=[1, 1, 2], per_token=[1])
