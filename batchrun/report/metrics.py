"""The job as Prometheus sees it: a text file that node_exporter's textfile collector, or anybody, can read."""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from batchrun.latency import Histogram
from batchrun.observe.events import RunBegan, RunProgress
from batchrun.report.series import Sample

_TOKENS = {
    "prompt_tokens": "Tokens of the prompts that the engine was given.",
    "cached_tokens": "Prompt tokens that came from a shared prefix.",
    "computed_tokens": "Tokens that went through the model.",
    "output_tokens": "Tokens generated.",
    "recomputed_tokens": "Tokens computed again after a preemption.",
    "steps": "Forward passes.",
    "swapped_bytes": "Bytes of keys and values moved to the host or back.",
}
_LATENCIES = {
    "queue": ("request_queue_time_seconds", "Time from a row's arrival in the engine to its first step."),
    "first_token": ("time_to_first_token_seconds", "Time from a row's arrival in the engine to its first token."),
    "per_token": ("time_per_output_token_seconds", "Time from one token of a row to the next."),
}
_BORDERS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


def exposition(metrics: "JobMetrics") -> bytes:
    """The text."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(metrics)
    return generate_latest(registry)


class JobMetrics(Collector):
    """A job's metrics at one moment: `total` over all its processes, and what is so `now`."""

    def __init__(self, total: Sample, now: RunProgress, facts: RunBegan, *, is_running: bool) -> None:
        self.total = total
        self.now = now
        self.facts = facts
        self._is_running = is_running

    def collect(self) -> Iterator[Metric]:
        yield InfoMetricFamily("batchrun_job", "What runs.", {"model": self.facts.model})
        yield from self._gauges()
        yield from self._counters()
        for name, (title, help) in _LATENCIES.items():
            histogram: Histogram = getattr(self.total.latencies, name)
            yield HistogramMetricFamily(
                f"batchrun_{title}", help, buckets=list(_cumulative(histogram)), sum_value=histogram.total
            )

    def _gauges(self) -> Iterator[Metric]:
        now, statistics = self.now, self.now.statistics
        rows = GaugeMetricFamily("batchrun_rows", "Rows of the input, by what has become of them.", labels=["state"])
        rows.add_metric(["completed"], now.rows_done - now.rows_failed)
        rows.add_metric(["failed"], now.rows_failed)
        rows.add_metric(["pending"], now.rows_total - now.rows_done)
        yield rows
        is_running = self._is_running
        values = {
            "running": (is_running, "Whether a process works on the job."),
            "requests_running": (statistics.num_running * is_running, "Rows in the batch."),
            "requests_waiting": (statistics.num_waiting * is_running, "Rows waiting in the engine."),
            "kv_cache_usage_ratio": (statistics.kv_usage * is_running, "Share of the KV pool in use, 0 to 1."),
            "last_update_timestamp_seconds": (self.total.at, "When this was written, since the epoch."),
        }
        for name, (value, help) in values.items():
            yield GaugeMetricFamily(f"batchrun_{name}", help, value=value)

    def _counters(self) -> Iterator[Metric]:
        counters = self.total.counters
        for name, help in _TOKENS.items():
            yield CounterMetricFamily(f"batchrun_{name}", help, value=getattr(counters, name))
        preemptions = CounterMetricFamily("batchrun_preemptions", "Rows that had to leave the batch.", labels=["way"])
        preemptions.add_metric(["recompute"], counters.recompute_preemptions)
        preemptions.add_metric(["swap"], counters.swap_preemptions)
        yield preemptions
        yield CounterMetricFamily("batchrun_run_seconds", "Time the engine ran.", value=self.total.seconds)


def _cumulative(histogram: Histogram) -> Iterable[tuple[str, int]]:
    """(border, how many durations are below), the last border being infinity."""
    for border in _BORDERS_S:
        yield str(border), histogram.count_up_to(border)
    yield "+Inf", histogram.count
