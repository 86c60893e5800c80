"""Where a run's metrics go beside the job folder: only to what an option or a variable names."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from batchrun.observe.events import Observe
from batchrun.report import gateway, telemetry
from batchrun.report.metrics import JobMetrics

Send = Callable[[JobMetrics], None]


@contextmanager
def sending(push_gateway: str | None, output: str, observe: Observe) -> Iterator[Send]:
    """Takes the metrics of the job of `output` as often as they are written; at the end the last have been sent."""
    with ExitStack() as stack:
        sends: list[Send] = []
        if push_gateway is not None:
            sends.append(stack.enter_context(gateway.pushing(push_gateway, output, observe)))
        if telemetry.is_wanted():
            sends.append(stack.enter_context(telemetry.exporting(output, observe)))

        def send(metrics: JobMetrics) -> None:
            for each in sends:
                each(metrics)

        yield send
