"""What `status` shows of a process that runs a job: the last events, in one small file.

Nothing is decided from it.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from batchrun.errors import StorageFailed
from batchrun.latency import Latencies
from batchrun.observe.events import Event, Observe, RunProgress
from batchrun.store.store import Store

_EVERY_S = 2.0


@contextmanager
def showing(store: Store, observe: Observe) -> Iterator[Observe]:
    """`observe`, and what `status` shows of this process; in the end how it ended.

    Latencies are those of all processes that have worked on the job, as far as these could say so.
    """
    before = Latencies.from_dict(store.read_progress().get("latencies", {}))
    latest: dict[str, object] = {"status": "in_progress", "latencies": before.to_dict()}
    written_at = float("-inf")

    def record(event: Event) -> None:
        nonlocal written_at
        observe(event)
        if isinstance(event, RunProgress):
            latest.update(_said(event) | {"latencies": (before + event.latencies).to_dict()})
            if time.monotonic() - written_at >= _EVERY_S:
                store.write_progress(latest)
                written_at = time.monotonic()

    store.write_progress(latest)
    ending = "failed"
    try:
        yield record
        ending = "finalizing" if latest.get("rows_done") == latest.get("rows_total") else "cancelled"
    except KeyboardInterrupt:
        ending = "cancelled"
        raise
    finally:
        try:
            store.write_progress(latest | {"status": ending})
        except StorageFailed:
            # The disk is what failed the job, most likely; its own error is on the way already.
            if ending != "failed":
                raise


def _said(event: RunProgress) -> dict[str, object]:
    """What `status` shows of a run: its figures, in one object."""
    counters, statistics = event.statistics.counters, event.statistics
    return {
        "rows_done": event.rows_done,
        "rows_total": event.rows_total,
        "rows_failed": event.rows_failed,
        "tokens_done": event.tokens_done,
        "tokens_total": event.tokens_total,
        "hit_rate": counters.hit_rate,
        "kv_usage": statistics.kv_usage,
        "preemptions": counters.preemptions,
        "num_running": statistics.num_running,
        "elapsed_s": event.elapsed_s,
        "output_tokens": counters.output_tokens,
    }
