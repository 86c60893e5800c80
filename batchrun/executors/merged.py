"""What several engines have to say of their work, as one: totals are added, gauges are of those that still run."""

from collections.abc import Iterable
from functools import reduce
from operator import add

from batchrun.engine.statistics import Counters, Statistics
from batchrun.latency import NUM_SLOWEST, Latencies
from batchrun.tally import EngineReport


def merged(running: Iterable[EngineReport], gone: Iterable[EngineReport]) -> EngineReport:
    """Of engines with pools of one size: the use of the pool, and its peak, is the mean of theirs."""
    running = tuple(running)
    reports = (*running, *gone)
    now = [report.statistics for report in running]
    finished = [report.statistics.counters.rows_finished for report in reports]
    outputs = (report.mean_output_len * max(rows, 1) for report, rows in zip(reports, finished, strict=True))
    return EngineReport(
        statistics=Statistics(
            counters=reduce(add, (report.statistics.counters for report in reports), Counters()),
            num_running=sum(each.num_running for each in now),
            num_waiting=sum(each.num_waiting for each in now),
            num_preempted=sum(each.num_preempted for each in now),
            num_nodes=sum(each.num_nodes for each in now),
            kv_usage=sum(each.kv_usage for each in now) / max(len(now), 1),
            kv_peak=sum(report.statistics.kv_peak for report in reports) / max(len(reports), 1),
        ),
        mean_output_len=sum(outputs) / max(sum(max(rows, 1) for rows in finished), 1),
        busy_s=sum(report.busy_s for report in reports),
        latencies=reduce(add, (report.latencies for report in reports), Latencies()),
        slowest=tuple(sorted((row for report in reports for row in report.slowest), reverse=True)[:NUM_SLOWEST]),
    )
