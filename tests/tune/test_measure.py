"""What is measured is the time of a step, whoever computes it, and nothing is measured that there is no time for."""

import pytest

from batchrun.engine.step_time import StepSize, fit, relative_errors
from batchrun.observe.events import Event, TuneProgress
from batchrun.tune.measure import Meter
from batchrun.tune.shapes import Group, Shape, grid, make_batch
from tests.tune.devices import TIMES, Queued, TimedEcho, ignore

SHAPES = grid(max_rows=64, max_tokens=1024, max_len=8191)


def sizes_of(shapes: list[Shape]) -> list[StepSize]:
    return [StepSize.of(make_batch(one, block_size=16, num_blocks=4096, vocab_size=259)) for one in shapes]


def test_the_grid_spans_rows_contexts_and_chunks() -> None:
    lone = [shape.groups[0] for shape in SHAPES if len(shape.groups) == 1]
    assert {group.num_rows for group in lone if group.num_tokens == 1} == {1, 2, 4, 8, 16, 32, 64}
    assert {group.num_cached + 1 for group in lone if group.num_tokens == 1} == {64, 512, 2048}
    chunks = {(group.num_tokens, group.num_cached) for group in lone if not group.samples}
    behind = {(num, cached) for num in (32, 64, 128, 256, 512) for cached in (0, 512, 2048, 4096)}
    assert chunks == behind | {(1024, 0)}
    assert [shape.num_tokens for shape in SHAPES] == sorted(shape.num_tokens for shape in SHAPES)


@pytest.mark.parametrize(("max_rows", "max_tokens", "max_len"), [(64, 1024, 255), (1, 7, 3), (256, 8192, 1023)])
def test_the_grid_keeps_to_its_limits(max_rows: int, max_tokens: int, max_len: int) -> None:
    shapes = grid(max_rows=max_rows, max_tokens=max_tokens, max_len=max_len)
    assert shapes
    for shape in shapes:
        batch = make_batch(shape, block_size=16, num_blocks=7, vocab_size=67)
        assert 0 < batch.num_tokens == shape.num_tokens <= max_tokens
        assert all(0 <= item.start < item.end <= max_len for item in batch.items)
        assert all(len(item.sequence.block_table) * 16 >= item.end for item in batch.items)
        assert all(0 <= block < 7 for item in batch.items for block in item.sequence.block_table)
        assert all(0 <= token < 67 for item in batch.items for token in item.context)


def test_rows_are_in_blocks_of_their_own() -> None:
    batch = make_batch(
        Shape((Group(3, 1, 110, True), Group(2, 9, 63, False))), block_size=16, num_blocks=63, vocab_size=9
    )
    blocks = [block for item in batch.items for block in item.sequence.block_table]
    assert len(blocks) == len(set(blocks)) == 3 * 7 + 2 * 5


def test_each_step_is_measured_and_explained() -> None:
    device = TimedEcho()
    measured = Meter(device, 259, device.clock, ignore).measure(SHAPES, budget_s=1e9)
    assert [one.size for one in measured] == sizes_of(SHAPES)
    assert [one.seconds for one in measured] == pytest.approx([TIMES.seconds(one.size) for one in measured])
    times = fit(*zip(*((one.size, one.seconds) for one in measured), strict=True))
    assert relative_errors(times, *zip(*((one.size, one.seconds) for one in measured), strict=True)).max() < 1e-6


def test_on_a_device_with_a_queue_the_host_is_not_measured() -> None:
    """Every step takes the device more than a second and the host a half, in which the device has the step before."""
    device = Queued(host_s=0.5)
    measured = Meter(device, 259, device.clock, ignore).measure(SHAPES, budget_s=1e9)
    assert [one.seconds for one in measured] == pytest.approx([TIMES.seconds(one.size) for one in measured])


def test_a_short_time_is_spent_on_the_smallest_steps() -> None:
    device = TimedEcho()
    measured = Meter(device, 259, device.clock, ignore).measure(SHAPES, budget_s=40.0)
    assert 3 <= len(measured) < len(SHAPES)
    assert [one.size for one in measured] == sizes_of(SHAPES)[: len(measured)]
    assert device.now_s < 2 * 40.0


def test_the_smallest_step_is_measured_in_no_time() -> None:
    device = TimedEcho()
    assert len(Meter(device, 259, device.clock, ignore).measure(SHAPES, budget_s=0.0)) == 1


def test_progress_ends_at_its_total() -> None:
    events: list[Event] = []
    device = TimedEcho()
    Meter(device, 259, device.clock, events.append).measure(SHAPES[:5], budget_s=1e9)
    assert events == [TuneProgress(steps, 20) for steps in range(1, 21)]


def test_the_pool_is_filled_before_it_is_read() -> None:
    """Memory that was never written is quicker to read than any that was."""
    device = TimedEcho(num_blocks=300)
    Meter(device, 259, device.clock, ignore).measure(SHAPES[:30], budget_s=1e9)
    filling = device.batches[0]
    written = {destination // 16 for _, destination in filling.slot_copies} | {0}
    read = {block for batch in device.batches for item in batch.items for block in item.sequence.block_table}
    assert read <= written == set(range(300))
