"""What `status` shows of a process that runs a job: the last events, in one small file.

Nothing is decided from it.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from batchrun.errors import BatchrunError, StorageFailed
from batchrun.latency import Latencies
from batchrun.observe.events import Event, Observe, RunProgress
from batchrun.store.store import Store

_EVERY_S = 2.0


@contextmanager
def showing(store: Store, observe: Observe) -> Iterator[Observe]:
    """`observe`, and what `status` shows of this process; in the end how it ended, and with which error.

    Latencies are those of all processes that have worked on the job, as far as these could say so.
    """
    before = Latencies.from_dict(store.read_progress().get("latencies", {}))
    latest: RunProgress | None = None
    written_at = float("-inf")

    def write(status: str, error: BatchrunError | None = None) -> None:
        said = _said(latest) if latest else {}
        latencies = before + latest.latencies if latest else before
        if error is not None:
            said["error"] = {"message": str(error), "exit_code": error.exit_code}
        store.write_progress({"status": status, **said, "latencies": latencies.to_dict()})

    def record(event: Event) -> None:
        nonlocal latest, written_at
        observe(event)
        if isinstance(event, RunProgress):
            latest = event
            if time.monotonic() - written_at >= _EVERY_S:
                write("in_progress")
                written_at = time.monotonic()

    write("in_progress")
    ending, failure = "failed", None
    try:
        yield record
        ending = "finalizing" if latest is None or latest.rows_done == latest.rows_total else "cancelled"
    except KeyboardInterrupt:
        ending = "cancelled"
        raise
    except BatchrunError as error:
        failure = error
        raise
    finally:
        try:
            write(ending, failure)
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
