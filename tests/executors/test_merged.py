"""Several engines' figures as one."""

from batchrun.engine.statistics import Counters, Statistics
from batchrun.executors.merged import merged
from batchrun.latency import Histogram, Latencies, RowTime
from batchrun.tally import EngineReport


def report(num: int, *, mean_output_len: float = 10.0) -> EngineReport:
    queue = Histogram()
    queue.add(0.5, times=num)
    return EngineReport(
        Statistics(
            Counters(steps=num, rows_finished=num, prompt_tokens=10 * num), num, num, 0, num, num / 10, kv_peak=num / 5
        ),
        mean_output_len,
        busy_s=float(num),
        latencies=Latencies(queue=queue),
        slowest=(RowTime(float(num), 0.0, num, 1, 1),),
    )


def test_totals_are_of_all_and_gauges_of_those_that_run() -> None:
    both = merged([report(2, mean_output_len=10.0), report(4, mean_output_len=40.0)], [report(6, mean_output_len=20.0)])
    assert both.statistics.counters == Counters(steps=12, rows_finished=12, prompt_tokens=120)
    assert (both.statistics.num_running, both.statistics.num_nodes) == (6, 6)
    assert round(both.statistics.kv_usage, 3) == 0.3
    assert round(both.statistics.kv_peak, 3) == 0.8, "a worker that is gone had its peak"
    assert both.mean_output_len == (2 * 10 + 4 * 40 + 6 * 20) / 12
    assert both.busy_s == 12.0
    assert both.latencies.queue.count == 12
    assert [row.row_idx for row in both.slowest] == [6, 4, 2]


def test_nobody_has_nothing_to_say() -> None:
    nothing = merged([], [])
    assert (nothing.statistics.counters, nothing.mean_output_len) == (Counters(), 0.0)
