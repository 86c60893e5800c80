"""Metrics and a span of a run for OpenTelemetry, where its variables name an endpoint: OTLP over HTTP.

The extra `otel`. The names are those for Prometheus, with a dot behind `batchrun`; prompts and answers are not sent.
"""

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from batchrun.observe.events import Message, Observe
from batchrun.report.metrics import JobMetrics

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
_TIMEOUT_S = 5
_LIBRARY = logging.getLogger("opentelemetry")


@contextmanager
def exporting(output: str, observe: Observe) -> Iterator[Callable[[JobMetrics], None]]:
    """What is given while it lasts is exported at the library's intervals and at the end, and then a span of it all.

    When it cannot be, for want of the extra or because the endpoint does not take it, it is said once.
    """
    with _saying_once(observe):
        try:
            meters, tracers = _providers()
        # A variable that the library cannot read is no fault of the job's.
        except Exception as error:
            remedy = "; pip install 'batchrun[otel]'" if isinstance(error, ImportError) else ""
            observe(
                Message("warning", f"{ENDPOINT} is set, and nothing is sent: {type(error).__name__}: {error}{remedy}")
            )
            yield lambda metrics: None
            return
        latest = _Latest(meters.get_meter("batchrun"))
        try:
            with tracers.get_tracer("batchrun").start_as_current_span("batchrun run", record_exception=False) as span:
                span.set_attribute("batchrun.output", output)
                try:
                    yield latest.take
                finally:
                    span.set_attributes(latest.attributes())
        finally:
            meters.shutdown(_TIMEOUT_S * 1000)
            tracers.shutdown()


def _providers() -> tuple[Any, Any]:
    """The library's providers of meters and tracers, which export over HTTP to what its variables say."""
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    resource = Resource.create({"service.name": "batchrun"}).merge(OTELResourceDetector().detect())
    reader = PeriodicExportingMetricReader(OTLPMetricExporter(timeout=_TIMEOUT_S))
    tracers = TracerProvider(resource=resource, shutdown_on_exit=False)
    tracers.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(timeout=_TIMEOUT_S)))
    return MeterProvider([reader], resource, shutdown_on_exit=False), tracers


def is_wanted() -> bool:
    """Whether the endpoint is set."""
    return bool(os.environ.get(ENDPOINT))


class _Latest:
    """The newest metrics, as instruments that are read when the library exports."""

    def __init__(self, meter: Any) -> None:
        self._meter = meter
        self._metrics: JobMetrics | None = None

    def take(self, metrics: JobMetrics) -> None:
        is_first, self._metrics = self._metrics is None, metrics
        if is_first:
            self._make_instruments(metrics)

    def attributes(self) -> dict[str, str | int]:
        """Of the span, by the conventions for generative models where there are any."""
        if self._metrics is None:
            return {}
        counters, now = self._metrics.total.counters, self._metrics.now
        return {
            "gen_ai.request.model": self._metrics.facts.model,
            "gen_ai.usage.input_tokens": counters.prompt_tokens,
            "gen_ai.usage.output_tokens": counters.output_tokens,
            "batchrun.rows": now.rows_total,
            "batchrun.rows.done": now.rows_done,
            "batchrun.rows.failed": now.rows_failed,
        }

    def _make_instruments(self, metrics: JobMetrics) -> None:
        makers = {
            "gauge": self._meter.create_observable_gauge,
            "counter": self._meter.create_observable_counter,
        }
        for family in metrics.collect():
            if family.type in makers:
                name = family.name.replace("batchrun_", "batchrun.", 1)
                makers[family.type](name, [self._reading(family.name)], description=family.documentation)

    def _reading(self, name: str) -> Callable[[Any], Iterable[Any]]:
        from opentelemetry.metrics import Observation

        def read(options: Any) -> Iterator[Observation]:
            assert self._metrics is not None
            for family in self._metrics.collect():
                if family.name == name:
                    yield from (Observation(float(sample.value), sample.labels) for sample in family.samples)

        return read


@contextmanager
def _saying_once(observe: Observe) -> Iterator[None]:
    """The library's own complaints, of which there is one for each try, as one warning at the end."""
    complaints: list[str] = []

    class First(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            complaints[:] = complaints or [record.getMessage()]

    handler, before = First(logging.WARNING), _LIBRARY.propagate
    _LIBRARY.addHandler(handler)
    _LIBRARY.propagate = False
    try:
        yield
    finally:
        _LIBRARY.removeHandler(handler)
        _LIBRARY.propagate = before
        if complaints:
            observe(Message("warning", f"{ENDPOINT} lacks metrics of this run: {complaints[0]}"))
