"""A finished job as a run of MLflow or Weights & Biases: its options as parameters, its summary as metrics.

The extras `mlflow` and `wandb`. Where they send it to is said by their own variables; rows are not sent.
"""

import os
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from batchrun.errors import UsageError
from batchrun.observe.events import Message, Observe

Tracker = Literal["mlflow", "wandb"]
_LONGEST_PARAMETER = 500


def require(tracker: Tracker) -> None:
    """Raises UsageError where its library is not installed, or it was not told where to send to."""
    if find_spec(tracker) is None:
        raise UsageError(f"--track {tracker} needs its library: pip install 'batchrun[{tracker}]'")
    if tracker == "mlflow" and not os.environ.get("MLFLOW_TRACKING_URI"):
        raise UsageError("--track mlflow: MLFLOW_TRACKING_URI is not set; it says where runs are kept")


def track(
    tracker: Tracker,
    name: str,
    options: Mapping[str, object],
    summary: Mapping[str, object],
    folder: Path,
    observe: Observe,
) -> None:
    """Logs the run, or says why it could not be; a job does not fail for want of it.

    What the library keeps on this machine meanwhile goes into `folder`, unless its variables say otherwise.
    """
    parameters = {key: str(value)[:_LONGEST_PARAMETER] for key, value in options.items()}
    metrics = dict(_numbers("", summary))
    try:
        if tracker == "mlflow":
            _to_mlflow(name, parameters, metrics)
        else:
            _to_wandb(name, parameters, metrics, folder)
    # Servers, credentials and disks of others; the answers are there.
    except Exception as error:
        observe(Message("warning", f"--track {tracker} has no run of this job: {type(error).__name__}: {error}"))
        return
    observe(Message("info", f"{tracker} has the run {name}"))


def _to_mlflow(name: str, parameters: Mapping[str, str], metrics: Mapping[str, float]) -> None:
    # It tells its makers what it is used for, unless it is told not to.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    import mlflow

    with mlflow.start_run(run_name=name):
        mlflow.log_params(dict(parameters))
        mlflow.log_metrics(dict(metrics))


def _to_wandb(name: str, parameters: Mapping[str, str], metrics: Mapping[str, float], folder: Path) -> None:
    # It tells its makers of its errors, unless it is told not to.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    run = wandb.init(
        name=name,
        project=os.environ.get("WANDB_PROJECT", "batchrun"),
        dir=os.environ.get("WANDB_DIR", str(folder)),
        config=dict(parameters),
        settings=wandb.Settings(silent=True, console="off", disable_git=True, save_code=False),
    )
    run.summary.update(dict(metrics))
    run.finish()


def _numbers(prefix: str, values: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    """The numbers among `values` and in the mappings inside, with dotted names."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(f"{prefix}{key}.", value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{key}", float(value)
