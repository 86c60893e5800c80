"""Writes down what a process does, while it does it: the series for the report, and metrics for Prometheus.

Takes the events of the run as anybody who observes it does, every half second, and makes a sample of those of a while.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from batchrun.errors import StorageFailed
from batchrun.observe.events import Event, Message, Observe, RunBegan, RunProgress
from batchrun.report.metrics import JobMetrics, exposition
from batchrun.report.sending import Send
from batchrun.report.series import Sample, began_line, ended_line, read, sample_line
from batchrun.store.durable import new_name, storage_errors, write_file
from batchrun.store.layout import Layout
from batchrun.store.store import Store

Ending = Literal["completed", "cancelled", "failed"]
MOST_SAMPLES = 600
_SHORTEST_S = 1.0
_METRICS_EVERY_S = 10.0


@contextmanager
def recording(store: Store, observe: Observe, send: Send = lambda metrics: None) -> Iterator[Observe]:
    """`observe`, and the job's series and metrics, which `send` gets too; at the end, how the process ended.

    When they cannot be written it is said once, and the job goes on without. A process that was succeeded writes none.
    """
    recorder = Recorder(store.at, store.tmp, send=send)
    is_failing = False

    def tried(write: Callable[[], None]) -> None:
        nonlocal is_failing
        if is_failing or not store.is_held:
            return
        try:
            write()
        except StorageFailed as error:
            is_failing = True
            observe(Message("warning", f"the report will lack what happens from now on: {error}"))

    def record(event: Event) -> None:
        observe(event)
        tried(lambda: recorder(event))

    ending: Ending = "failed"
    try:
        yield record
        ending = "completed" if recorder.is_all_done else "cancelled"
    except KeyboardInterrupt:
        ending = "cancelled"
        raise
    finally:
        tried(lambda: recorder.close(ending))


class Recorder:
    """Appends samples to the job's series; makes them longer when there are many.

    Unfinished files are in `tmp`. `clock` is in seconds.
    """

    def __init__(
        self,
        at: Layout,
        tmp: Path,
        clock: Callable[[], float] = time.time,
        send: Send = lambda metrics: None,
    ) -> None:
        self._at = at
        self._tmp = tmp
        self._clock = clock
        self._send = send
        self._began_at = clock()
        before = read(at.series)
        self._before = before.total
        self._num_samples = len(before.samples)
        self._most = max(MOST_SAMPLES, 2 * self._num_samples)
        self._every_s = max(_SHORTEST_S, before.seconds / (MOST_SAMPLES // 2))
        self._facts: RunBegan | None = None
        self._last: RunProgress | None = None  # taken in
        self._sampled: RunProgress | None = None  # the last of a sample
        self._sample: Sample | None = None  # not written yet
        self._written: Sample | None = None  # what this process has written, as one
        self._metrics_at = float("-inf")

    @property
    def is_all_done(self) -> bool:
        return self._last is None or self._last.rows_done == self._last.rows_total

    def __call__(self, event: Event) -> None:
        match event:
            case RunBegan():
                self._facts = event
                self._append(began_line(self._began_at, self._clock() - self._began_at, asdict(event)))
            case RunProgress() if self._facts is not None:
                self._take(event)

    def close(self, ending: Ending) -> None:
        """Writes what is left, and how it ended."""
        if self._facts is None:
            return
        self._write_sample()
        self._append(ended_line(ending))
        self._write_metrics(is_running=False)

    def _take(self, event: RunProgress) -> None:
        following = self._since(event)
        self._sample = following if self._sample is None else self._sample + following
        self._last = event
        if self._sample.seconds >= self._every_s:
            self._write_sample()
        if event.elapsed_s - self._metrics_at >= _METRICS_EVERY_S:
            self._metrics_at = event.elapsed_s
            self._write_metrics(is_running=True)

    def _since(self, event: RunProgress) -> Sample:
        """What happened between the event before and this one; latencies are taken when the sample is written."""
        last, now = self._last, event.statistics
        return Sample(
            at=self._clock(),
            seconds=event.elapsed_s - (last.elapsed_s if last else 0.0),
            rows_done=event.rows_done,
            rows_failed=event.rows_failed,
            num_running=now.num_running,
            num_waiting=now.num_waiting + now.num_preempted,
            kv_usage=now.kv_usage,
            # Between two looks the pool may have been fuller: the engine knows how full it ever was. Of several the
            # peak is a mean over those that are gone, too, and may be less than the use of those that run.
            kv_peak=max(now.kv_usage, now.kv_peak if last is None or now.kv_peak > last.statistics.kv_peak else 0.0),
            num_nodes=now.num_nodes,
            busy_s=event.busy_s - (last.busy_s if last else 0.0),
            counters=now.counters - last.statistics.counters if last else now.counters,
        )

    def _write_sample(self) -> None:
        sample, event, before = self._sample, self._last, self._sampled
        if sample is None or event is None:
            return
        latencies = event.latencies - before.latencies if before else event.latencies
        slowest = set(event.slowest) - set(before.slowest if before else ())
        sample += Sample(
            sample.at, 0.0, sample.rows_done, sample.rows_failed, sample.num_running, sample.num_waiting,
            sample.kv_usage, sample.kv_peak, sample.num_nodes, 0.0, latencies=latencies, slowest=tuple(slowest),
        )  # fmt: skip
        self._append(sample_line(sample))
        self._written = sample if self._written is None else self._written + sample
        self._sample, self._sampled = None, event
        self._num_samples += 1
        if self._num_samples >= self._most:
            self._thin()

    def _append(self, line: str) -> None:
        path = self._at.series
        with storage_errors(path), path.open("a+b") as file:
            # A power cut may have torn the last line.
            if file.tell() and (file.seek(-1, 2), file.read(1))[1] != b"\n":
                file.write(b"\n")
            file.write(line.encode())

    def _thin(self) -> None:
        thinned = read(self._at.series).thinned()
        with storage_errors(self._at.series):
            write_file(self._at.series, thinned.to_lines().encode(), self._tmp)
        self._num_samples = len(thinned.samples)
        # Runs of one sample cannot be thinned.
        self._most = max(MOST_SAMPLES, 2 * self._num_samples)
        self._every_s *= 2

    def _write_metrics(self, *, is_running: bool) -> None:
        totals = [sample for sample in (self._before, self._written, self._sample) if sample is not None]
        if not totals or self._last is None or self._facts is None:
            return
        total = totals[0]
        for sample in totals[1:]:
            total += sample
        now = JobMetrics(total, self._last, self._facts, is_running=is_running)
        self._send(now)
        temporary = new_name(self._tmp, self._at.metrics.name)
        with storage_errors(self._at.metrics):
            # Not synced: nothing is decided from it, and the engine waits meanwhile.
            temporary.write_bytes(exposition(now))
            temporary.replace(self._at.metrics)
