"""Metrics for a Pushgateway of Prometheus, as jobs that nobody scrapes leave them.

They go from a thread of their own: the engine does not wait for the network, and no failure of it ends a job.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, pushadd_to_gateway

from batchrun.observe.events import Message, Observe
from batchrun.report.metrics import JobMetrics

Push = Callable[[JobMetrics], None]
_JOB = "batchrun"
_TIMEOUT_S = 5.0


@contextmanager
def pushing(url: str, output: str, observe: Observe) -> Iterator[Push]:
    """What is given while it lasts is pushed to the gateway at `url`, unless something newer has come meanwhile; the
    last of it at the end.

    Its group is that of the job `batchrun` and of this `output`. When the gateway does not take it, it is said once.
    """
    pusher = _Pusher(url, output)
    thread = threading.Thread(target=pusher.run, daemon=True, name="pushgateway")
    thread.start()
    try:
        yield pusher.take
    finally:
        pusher.end()
        # One that is under way, and the last.
        thread.join(2 * _TIMEOUT_S + 1.0)
        if pusher.complaint:
            observe(Message("warning", f"--push-gateway {url} lacks metrics of this run: {pusher.complaint}"))


class _Pusher:
    """Hands what a thread takes to another that pushes it; `complaint` is why the first failure was one."""

    def __init__(self, url: str, output: str) -> None:
        self._url = url
        self._output = output
        self._changed = threading.Condition()
        self._latest: JobMetrics | None = None
        self._is_over = False
        self.complaint = ""

    def take(self, metrics: JobMetrics) -> None:
        with self._changed:
            self._latest = metrics
            self._changed.notify()

    def end(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify()

    def run(self) -> None:
        while (metrics := self._next()) is not None:
            registry = CollectorRegistry(auto_describe=False)
            registry.register(metrics)
            try:
                pushadd_to_gateway(self._url, _JOB, registry, {"output": self._output}, _TIMEOUT_S)
            # Whatever is wrong with the gateway or its URL is not wrong with the job.
            except Exception as error:
                self.complaint = self.complaint or str(error)

    def _next(self) -> JobMetrics | None:
        """The newest that was not pushed; None when there will be no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._latest is not None or self._is_over)
            latest, self._latest = self._latest, None
            return latest
