"""A step that raises costs the rows that it raises for, and nobody else a token."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from batchrun.engine.echo import EOS_TOKEN_ID, EchoRunner
from batchrun.engine.engine import Engine
from batchrun.engine.request import Completion, Request, SamplingParams
from batchrun.engine.scheduler import SchedulerConfig
from batchrun.engine.step import Ended, Item, ScheduledBatch
from batchrun.errors import EngineFailed
from tests.engine.test_engine_with_echo import MEAN_OUTPUT_LEN, expected, random_prompts, requests_of, run

Fails = Callable[[ScheduledBatch], bool]


class FaultyRunner(EchoRunner):
    """Raises for some steps, when half of them is written."""

    def __init__(self, fails: Fails, *, num_blocks: int = 60, overlaps: bool = False) -> None:
        super().__init__(num_blocks, 4, 20, MEAN_OUTPUT_LEN, overlaps=overlaps)
        self.fails = fails

    def launch(self, batch: ScheduledBatch) -> Ended:
        if self.fails(batch):
            super().launch(replace(batch, items=batch.items[: len(batch.items) // 2]))
            self._pool[:] = 99  # nothing that was kept may be read again
            raise RuntimeError("a kernel fell over\nsomewhere")
        return super().launch(batch)


def has(batch: ScheduledBatch, rows: set[int], at: Callable[[Item], bool] = lambda item: True) -> bool:
    return any(item.sequence.request.row_idx in rows and at(item) for item in batch.items)


def make_engine(runner: EchoRunner, **options: int) -> Engine:
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 16, **options}
    config = SchedulerConfig(
        runner.num_blocks, runner.num_host_slots, 4, runner.block_bytes, eos_token_ids=frozenset({EOS_TOKEN_ID}),
        preemption="swap", num_free_tokens=0 if runner.overlaps else 8, **settings,
    )  # fmt: skip
    return Engine(config, runner, decode=lambda ids: "".join(map(chr, ids)))


def make_requests(num_rows: int = 24) -> list[Request]:
    prompts = random_prompts(random.Random(3), num_rows, vocab=6)
    return requests_of(prompts, [SamplingParams(max_tokens=20)] * num_rows)


def check(done: dict[int, Completion], requests: list[Request], fallen: set[int]) -> None:
    for request in requests:
        completion = done[request.row_idx]
        if request.row_idx in fallen:
            assert completion.error is not None
            assert completion.error.type == "engine_error"
            assert completion.error.message == "the engine fails on this row: RuntimeError: a kernel fell over"
        else:
            assert list(completion.token_ids) == expected(request)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("fallen", [set(), {0}, {23}, {3, 4, 17}], ids=str)
def test_rows_that_cannot_be_computed_fail_and_the_others_answer_as_ever(fallen: set[int], overlaps: bool) -> None:
    """From their first token; sharing, swapping and guessing go on."""
    requests = make_requests()
    runner = FaultyRunner(lambda batch: has(batch, fallen), overlaps=overlaps)
    check(run(make_engine(runner), requests), requests, fallen)


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_row_may_fail_when_it_has_generated_some(overlaps: bool) -> None:
    """Where steps overlap, behind a token that the step before it has sampled and nobody knows yet."""
    requests = make_requests()
    fallen = {row for row in (3, 4, 17) if len(expected(requests[row])) > 5}
    assert fallen
    runner = FaultyRunner(lambda batch: has(batch, fallen, lambda item: item.output_len >= 5), overlaps=overlaps)
    done = run(make_engine(runner), requests)
    check(done, requests, fallen)
    assert all(done[row].token_ids == tuple(expected(requests[row])[:5]) for row in fallen)


@pytest.mark.parametrize("first", range(1, 60, 7))
@pytest.mark.parametrize("overlaps", [False, True])
def test_failures_that_pass_cost_no_row_anything(first: int, overlaps: bool) -> None:
    """Wherever they come, and once more soon after."""
    steps = iter(range(1000))
    runner = FaultyRunner(lambda batch: next(steps) in (first, first + 9), overlaps=overlaps)
    requests = make_requests()
    check(run(make_engine(runner), requests), requests, set())


@pytest.mark.parametrize("num_blocks", [23, 24, 27])
def test_a_row_that_leaves_while_its_step_is_in_flight_is_not_waited_for(
    num_blocks: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The step that makes it leave fails, and the one before, which has it, is lost as well; no other step fails."""
    num_failures = 0

    def fails(batch: ScheduledBatch) -> bool:
        nonlocal num_failures
        num_failures += bool(batch.swap_outs)
        return bool(batch.swap_outs)

    requests = make_requests()
    engine = make_engine(FaultyRunner(fails, num_blocks=num_blocks, overlaps=True), max_num_batched_tokens=40)
    check(run(engine, requests), requests, set())
    assert caplog.text.count("a step failed") == num_failures > 0


def test_a_lone_row_that_fails_ends_its_job_with_an_error_row() -> None:
    requests = make_requests(1)
    check(run(make_engine(FaultyRunner(lambda batch: True)), requests), requests, {0})


@pytest.mark.parametrize("overlaps", [False, True])
def test_an_engine_that_computes_nothing_any_more_fails_no_row(overlaps: bool) -> None:
    """As after a device is lost; the rows that ran are named."""
    steps = iter(range(1000))
    engine = make_engine(FaultyRunner(lambda batch: next(steps) > 12, overlaps=overlaps))
    with pytest.raises(EngineFailed, match="no row can be computed any more: RuntimeError: a kernel") as raised:
        run(engine, make_requests())
    assert len(raised.value.rows) > 1


def test_rows_that_fail_together_only_are_not_tried_for_ever() -> None:
    engine = make_engine(FaultyRunner(lambda batch: has(batch, {2}) and has(batch, {3})))
    with pytest.raises(EngineFailed, match="again and again, and no row fails alone"):
        run(engine, make_requests())


def test_a_row_that_is_computed_for_long_before_it_fails_is_not_tried_for_ever() -> None:
    """Each time more steps go well than after which a failure is forgotten, and nothing comes of them."""
    (request,) = requests_of([[3] * 2000], [SamplingParams(max_tokens=20)])

    def fails(batch: ScheduledBatch) -> bool:
        """But not where the culprit is looked for, with a token to generate."""
        return any(item.end >= 2000 and item.sequence.request.sampling.max_tokens > 1 for item in batch.items)

    engine = make_engine(FaultyRunner(fails, num_blocks=700))
    with pytest.raises(EngineFailed, match="again and again, and no row fails alone"):
        run(engine, [request])


def test_one_row_after_another_that_fails_alone_is_the_engines_fault() -> None:
    engine = make_engine(FaultyRunner(lambda batch: True), max_num_seqs=1)
    for request in make_requests():
        engine.add(request)
    ended = [engine.step()[0].row_idx for _ in range(7)]
    assert ended == list(range(7))
    with pytest.raises(EngineFailed):
        engine.step()
