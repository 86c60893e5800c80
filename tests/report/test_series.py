"""The record of a run: nothing is lost when it is thinned, killed or continued."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from batchrun.latency import Histogram, Latencies, RowTime
from batchrun.observe.events import Event, Message
from batchrun.report import recorder as recording_module
from batchrun.report.recorder import Recorder, recording
from batchrun.report.series import Sample, Series, read
from batchrun.store.layout import Layout
from batchrun.store.store import Store
from tests.report.samples import BEGAN, progress, sample, series


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@contextmanager
def kept(at: Layout) -> Iterator[None]:
    """The folder is not taken for one that came to nothing."""
    at.plan.mkdir(exist_ok=True)
    yield


@pytest.fixture
def at(tmp_path: Path) -> Layout:
    layout = Layout(tmp_path / "out")
    layout.tmp.mkdir(parents=True)
    return layout


def record(at: Layout, num: int, *, every_s: float = 1.0, ending: str | None = "completed") -> None:
    """A process with `num` events, one each `every_s` seconds; None: it was killed."""
    clock = Clock()
    recorder = Recorder(at, at.tmp, clock)
    clock.now_s += 5.0
    recorder(BEGAN)
    for number in range(1, num + 1):
        clock.now_s += every_s
        recorder(progress(number * every_s, 10 * number, rows_total=10 * num, output_tokens=100 * number))
    if ending is not None:
        recorder.close(ending)  # type: ignore[arg-type]


def test_a_sample_survives_its_file(at: Layout) -> None:
    waits = Histogram()
    waits.add(0.25, times=3)
    rich = sample(latencies=Latencies(first_token=waits), slowest=(RowTime(2.5, 0.25, 7, 100, 20),))
    at.series.write_text(series(rich, sample(at=1002.0)).to_lines())
    assert read(at.series) == series(rich, sample(at=1002.0))


def test_two_samples_as_one_say_what_both_said() -> None:
    one, other = sample(seconds=1.0, kv_usage=0.2), sample(at=1003.0, seconds=3.0, kv_usage=0.6, kv_peak=0.9)
    both = one + other
    assert (both.at, both.seconds, both.kv_usage, both.kv_peak) == (1003.0, 4.0, pytest.approx(0.5), 0.9)
    assert (both.counters.output_tokens, both.busy_s, both.rows_done) == (160, 3.0, 10)


def test_recorded_samples_are_what_was_added_between_them(at: Layout) -> None:
    record(at, 4)
    (run,) = read(at.series).runs
    assert (run.at, run.load_s, run.ended, run.facts["max_num_seqs"]) == (1000.0, 5.0, "completed", 8)
    assert [sample.seconds for sample in run.samples] == [1.0] * 4
    assert [sample.counters.output_tokens for sample in run.samples] == [100] * 4
    assert [sample.latencies.first_token.count for sample in run.samples] == [10] * 4
    assert [sample.rows_done for sample in run.samples] == [10, 20, 30, 40]
    assert run.total is not None
    assert [row.row_idx for row in run.total.slowest] == list(range(40, 30, -1))


def test_the_peak_between_two_looks_is_kept(at: Layout) -> None:
    """Only what was seen at the moment of a look counted, so that a short run had a peak of nothing."""
    recorder = Recorder(at, at.tmp, Clock())
    recorder(BEGAN)
    for elapsed_s, usage, peak in ((1.0, 0.0, 0.2), (2.0, 0.1, 0.2), (3.0, 0.1, 0.7), (4.0, 0.9, 0.8)):
        event = progress(elapsed_s, 1)
        recorder(replace(event, statistics=replace(event.statistics, kv_usage=usage, kv_peak=peak)))
    recorder.close("completed")
    assert [sample.kv_peak for sample in read(at.series).samples] == [0.2, 0.1, 0.7, 0.9]
    assert read(at.series).peak_kv_bytes == round(0.9 * BEGAN.pool_bytes)


def test_a_killed_process_leaves_its_samples_and_the_next_goes_on_behind_them(at: Layout) -> None:
    record(at, 3, ending=None)
    with at.series.open("ab") as file:
        file.write(b'{"sample":{"at":10')  # torn by a power cut
    record(at, 2)
    first, second = read(at.series).runs
    assert (len(first.samples), first.ended) == (3, None)
    assert (len(second.samples), second.ended) == (2, "completed")


def test_a_long_run_has_no_more_samples_than_a_picture_needs(at: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording_module, "MOST_SAMPLES", 20)
    record(at, 1000)
    found = read(at.series)
    assert 8 <= len(found.samples) <= 20
    total = found.total
    assert total is not None
    assert (total.seconds, total.counters.output_tokens, total.latencies.first_token.count) == (1000.0, 100_000, 10_000)
    seconds = [each.seconds for each in found.samples]
    assert max(seconds[:-1]) <= 4 * min(seconds[:-1])


def test_many_short_processes_do_not_thin_what_cannot_be_thinned(at: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording_module, "MOST_SAMPLES", 4)
    for _ in range(12):
        record(at, 1, ending="failed")
    assert [len(run.samples) for run in read(at.series).runs] == [1] * 12


def test_thinning_keeps_the_total() -> None:
    full = series(*(sample(at=1000.0 + number, kv_usage=0.5, kv_peak=number / 10) for number in range(7)))
    thinned = full.thinned()
    assert len(thinned.samples) == 4
    assert thinned.total == full.total == reduce(Sample.__add__, full.samples)


@pytest.mark.parametrize("content", [b"", b"\x00\xff\n", b"[]\n", b'{"sample":{}}\n', b'{"began":3}\n{"other":1}\n'])
def test_a_damaged_series_is_as_good_as_none(at: Layout, content: bytes) -> None:
    at.series.write_bytes(content)
    assert read(at.series) == Series()


def test_how_it_ended_is_written_whatever_ends_it(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "out")
    at = store.at

    def work(error: type[BaseException]) -> None:
        with store.lock(), kept(at), recording(store, lambda event: None) as observe:
            observe(BEGAN)
            observe(progress(1.0, 5))
            raise error

    for error, how in ((KeyboardInterrupt, "cancelled"), (RuntimeError, "failed")):
        with pytest.raises(error):
            work(error)
        assert read(at.series).runs[-1].ended == how
    with store.lock(), kept(at), recording(store, lambda event: None) as observe:
        observe(BEGAN)
        observe(progress(1.0, 5))  # of 1,000
    assert read(at.series).runs[-1].ended == "cancelled"


def test_a_series_that_cannot_be_written_is_said_once_and_costs_nothing_else(tmp_path: Path) -> None:
    store, said = Store.open(tmp_path / "out"), list[Event]()
    with store.lock(), kept(store.at):
        store.at.series.mkdir()
        with recording(store, said.append) as observe:
            for event in (BEGAN, progress(1.0, 5), progress(2.0, 6)):
                observe(event)
    (message,) = [event.text for event in said if isinstance(event, Message)]
    assert message.startswith(f"the report will lack what happens from now on: {store.at.series}: Is a directory")


def test_a_process_that_was_succeeded_records_nothing(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "out")
    with store.lock(), kept(store.at), recording(store, lambda event: None) as observe:
        observe(BEGAN)
        before = store.at.series.read_bytes()
        store.at.lock.rename(store.at.tmp / "aside")
        store.at.lock.write_bytes(b"somebody else")
        observe(progress(1.0, 5))
    assert store.at.series.read_bytes() == before


def test_metrics_are_prometheus_and_count_over_all_processes(at: Layout) -> None:
    record(at, 3)
    record(at, 2)
    families = text_string_to_metric_families(at.metrics.read_text())
    values = {(one.name, *one.labels.values()): one.value for family in families for one in family.samples}
    assert values["batchrun_output_tokens_total",] == 500
    assert values["batchrun_run_seconds_total",] == 5.0
    assert values["batchrun_rows", "completed"] == 18
    assert values["batchrun_rows", "failed"] == 2
    assert values["batchrun_running",] == 0
    assert values["batchrun_job_info", "tiny <b>"] == 1
    assert values["batchrun_time_to_first_token_seconds_bucket", "0.1"] == 0
    assert values["batchrun_time_to_first_token_seconds_bucket", "0.3"] == 50
    assert values["batchrun_time_to_first_token_seconds_sum",] == pytest.approx(50 * 0.25, rel=0.02)
    assert list(at.tmp.iterdir()) == []
