"""Events of a run, and samples, with figures that tell them apart."""

from batchrun.engine.statistics import Counters, Statistics
from batchrun.latency import Histogram, Latencies, RowTime
from batchrun.observe.events import RunBegan, RunProgress
from batchrun.report.series import Run, Sample, Series

BEGAN = RunBegan("tiny <b>", 4096, 1 << 20, 8, 64, True, is_gpu=False)
FACTS = {
    "model": "tiny <b>", "pool_tokens": 4096, "pool_bytes": 1 << 20, "max_num_seqs": 8, "max_num_batched_tokens": 64,
    "shares_prefixes": True, "is_gpu": False, "num_workers": 1,
}  # fmt: skip


def progress(elapsed_s: float, rows_done: int, *, rows_total: int = 1000, **counters: int) -> RunProgress:
    statistics = Statistics(Counters(**counters), 7, 20, 1, 33, kv_usage=0.5, kv_peak=0.5)
    first_token = Histogram()
    first_token.add(0.25, times=max(rows_done, 1))
    slowest = tuple(
        RowTime(float(row), 0.5, row, 100 + row, row) for row in range(rows_done, max(rows_done - 10, 0), -1)
    )
    return RunProgress(
        rows_done=rows_done,
        rows_total=rows_total,
        rows_failed=2,
        tokens_done=rows_done,
        tokens_total=rows_total,
        elapsed_s=elapsed_s,
        statistics=statistics,
        latencies=Latencies(first_token=first_token),
        slowest=slowest,
        busy_s=elapsed_s / 2,
    )


def sample(at: float = 1000.0, seconds: float = 2.0, **changed: object) -> Sample:
    usual: dict[str, object] = {
        "rows_done": 10, "rows_failed": 1, "num_running": 4.0, "num_waiting": 100.0, "kv_usage": 0.4, "kv_peak": 0.5,
        "num_nodes": 9, "busy_s": 1.5,
        "counters": Counters(
            steps=10, prompt_tokens=400, cached_tokens=300, computed_tokens=180, computed_prompt_tokens=100,
            output_tokens=80,
        ),
    }  # fmt: skip
    return Sample(at, seconds, **(usual | changed))  # type: ignore[arg-type]


def series(*samples: Sample, **facts: object) -> Series:
    """One run of these samples, which came to its end."""
    return Series((Run(990.0, 3.0, FACTS | facts, samples, "completed"),))
