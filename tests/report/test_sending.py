"""Metrics that go to a Pushgateway and to an OTLP endpoint: real clients, and a receiver on loopback."""

import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from batchrun import lifecycle
from batchrun.observe.events import Event, Message
from batchrun.stop import StopRequest
from tests.run.conftest import EchoJob
from tests.run.conftest import echo_job as echo_job

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Receiver:
    """Takes every request, or refuses every one, and writes down method, path and body."""

    def __init__(self, status: int = 200) -> None:
        self.requests: list[tuple[str, str, bytes]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def take(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"] or 0))
                receiver.requests.append((self.command, self.path, body))
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_POST = do_PUT = take

            def log_message(self, *arguments: Any) -> None:
                """Says nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def bodies(self, path: str) -> list[bytes]:
        return [body for _, at, body in self.requests if at == path]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    found = Receiver()
    yield found
    found.close()


@pytest.fixture
def refusing() -> Iterator[Receiver]:
    found = Receiver(status=400)
    yield found
    found.close()


def warnings(job: EchoJob, **options: object) -> list[str]:
    """Runs the job; what it warns of."""
    said: list[Event] = []
    outcome = lifecycle.submit(job.job(**options), said.append, StopRequest())
    assert (outcome.rows, outcome.num_failed) == (len(job.prompts), 0)
    return [event.text for event in said if isinstance(event, Message) and event.level == "warning"]


def test_without_option_and_variable_nothing_is_sent(echo_job: Callable[[int], EchoJob], receiver: Receiver) -> None:
    assert warnings(echo_job(63)) == []
    assert receiver.requests == []


def test_the_gateway_has_the_last_metrics(echo_job: Callable[[int], EchoJob], receiver: Receiver) -> None:
    job = echo_job(63)
    assert warnings(job, push_gateway=receiver.url) == []
    method, path, body = receiver.requests[-1]
    assert (method, path.split("@")[0]) == ("POST", "/metrics/job/batchrun/output")
    assert b'batchrun_rows{state="completed"} 63.0' in body
    assert b"batchrun_running 0.0" in body
    assert body == (job.folder / "out.batchrun" / "metrics.prom").read_bytes()


def test_a_gateway_that_refuses_or_is_not_there_is_said_once(
    echo_job: Callable[[int], EchoJob], refusing: Receiver
) -> None:
    (warning,) = warnings(echo_job(63), push_gateway=refusing.url)
    assert warning == f"--push-gateway {refusing.url} lacks metrics of this run: HTTP Error 400: Bad Request"
    refusing.close()
    (warning,) = warnings(echo_job(63), push_gateway=refusing.url, overwrite=True)
    assert "Connection refused" in warning


def test_the_endpoint_has_metrics_and_a_span(
    echo_job: Callable[[int], EchoJob], receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
    job = echo_job(63)
    assert warnings(job) == []
    request = ExportMetricsServiceRequest.FromString(receiver.bodies("/v1/metrics")[-1])
    (resource,) = request.resource_metrics
    assert text_attributes(resource.resource)["service.name"] == "batchrun"
    metrics = {metric.name: metric for scope in resource.scope_metrics for metric in scope.metrics}
    rows = {
        point.attributes[0].value.string_value: point.as_double for point in metrics["batchrun.rows"].gauge.data_points
    }
    assert rows == {"completed": 63, "failed": 0, "pending": 0}
    (tokens,) = metrics["batchrun.output_tokens"].sum.data_points
    assert tokens.as_double > 63

    spans = ExportTraceServiceRequest.FromString(receiver.bodies("/v1/traces")[-1])
    ((span,),) = [scope.spans for resource in spans.resource_spans for scope in resource.scope_spans]
    assert span.name == "batchrun run"
    values = {each.key: each.value for each in span.attributes}
    assert values["gen_ai.request.model"].string_value == "echo"
    assert values["gen_ai.usage.output_tokens"].int_value == tokens.as_double
    assert values["batchrun.rows.done"].int_value == 63
    assert values["batchrun.output"].string_value == str(job.out)


def test_the_variables_of_the_library_name_the_service(
    echo_job: Callable[[int], EchoJob], receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "nightly")
    warnings(echo_job(7))
    request = ExportMetricsServiceRequest.FromString(receiver.bodies("/v1/metrics")[-1])
    assert text_attributes(request.resource_metrics[0].resource)["service.name"] == "nightly"


def test_no_prompt_is_sent(
    echo_job: Callable[[int], EchoJob], receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
    warnings(echo_job(63), push_gateway=receiver.url)
    assert receiver.requests
    assert not [path for _, path, body in receiver.requests if b"questions about numbers" in body]


def test_an_endpoint_that_refuses_is_said_once(
    echo_job: Callable[[int], EchoJob], refusing: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", refusing.url)
    (warning,) = warnings(echo_job(63))
    assert warning.startswith("OTEL_EXPORTER_OTLP_ENDPOINT lacks metrics of this run: Failed to export")


def test_a_variable_that_the_library_cannot_read_costs_the_metrics_only(
    echo_job: Callable[[int], EchoJob], receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "-5")
    (warning,) = warnings(echo_job(63))
    assert warning.startswith("OTEL_EXPORTER_OTLP_ENDPOINT is set, and nothing is sent: ValueError: ")
    assert receiver.requests == []


def test_without_the_extra_it_is_said_what_to_install(
    echo_job: Callable[[int], EchoJob], receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    (warning,) = warnings(echo_job(63))
    assert warning.startswith("OTEL_EXPORTER_OTLP_ENDPOINT is set, and nothing is sent: ")
    assert warning.endswith("; pip install 'batchrun[otel]'")


def text_attributes(resource: Any) -> dict[str, str]:
    return {each.key: each.value.string_value for each in resource.attributes}
