"""A finished job in MLflow's and Weights & Biases' own stores, offline."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from batchrun import lifecycle
from batchrun.errors import UsageError
from batchrun.observe.events import Event, Message
from batchrun.outcome import Outcome
from batchrun.stop import StopRequest
from tests.run.conftest import EchoJob
from tests.run.conftest import echo_job as echo_job

# Their own, and their dependencies'.
pytestmark = pytest.mark.filterwarnings("default")
NEEDS = {name: pytest.mark.skipif(find_spec(name) is None, reason=f"needs {name}") for name in ("mlflow", "wandb")}


def run(job: EchoJob, **options: object) -> tuple[Outcome, list[str]]:
    """The outcome, and what was warned of."""
    said: list[Event] = []
    outcome = lifecycle.submit(job.job(**options), said.append, StopRequest())
    return outcome, [event.text for event in said if isinstance(event, Message) and event.level == "warning"]


@NEEDS["mlflow"]
def test_mlflow_has_options_as_parameters_and_the_summary_as_metrics(
    echo_job: Callable[[int], EchoJob], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "runs").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    outcome, warned = run(echo_job(63), track="mlflow", max_tokens=9, stop=("x",))
    assert warned == []
    client = MlflowClient()
    (found,) = client.search_runs([each.experiment_id for each in client.search_experiments()])
    assert found.info.run_name == "out"
    assert found.info.status == "FINISHED"
    assert {"model": "echo", "max_tokens": "9", "stop": "['x']"}.items() <= found.data.params.items()
    assert "temperature" not in found.data.params, "what is not the default only"
    assert found.data.metrics["rows"] == 63
    assert found.data.metrics["output_tokens"] == outcome.output_tokens
    assert "latencies.queue_time_s.p50" in found.data.metrics


@NEEDS["wandb"]
def test_wandb_keeps_an_offline_run_in_the_job_folder(
    echo_job: Callable[[int], EchoJob], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    job = echo_job(63)
    before = {*tmp_path.iterdir()}
    _, warned = run(job, track="wandb")
    assert warned == []
    (kept,) = (tmp_path / "out.batchrun" / "wandb").glob("offline-run-*/*.wandb")
    content = kept.read_bytes()
    assert b"latencies.queue_time_s.p50" in content or b"output_tokens" in content
    assert {path.name for path in {*tmp_path.iterdir()} - before} == {"out", "out.batchrun"}
    assert run(job)[0].already_complete


@NEEDS["mlflow"]
def test_a_store_that_cannot_be_reached_is_a_warning(
    echo_job: Callable[[int], EchoJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    outcome, (warning,) = run(echo_job(63), track="mlflow")
    assert outcome.rows == 63
    assert warning.startswith("--track mlflow has no run of this job: MlflowException: ")


@NEEDS["mlflow"]
def test_mlflow_must_be_told_where_runs_are_kept(
    echo_job: Callable[[int], EchoJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    job = echo_job(63)
    with pytest.raises(UsageError, match=r"^--track mlflow: MLFLOW_TRACKING_URI is not set"):
        run(job, track="mlflow")
    assert not (job.folder / "out.batchrun").exists()


@pytest.mark.parametrize("tracker", ["mlflow", "wandb"])
def test_a_library_that_is_missing_is_named_before_anything_runs(
    echo_job: Callable[[int], EchoJob], monkeypatch: pytest.MonkeyPatch, tracker: str
) -> None:
    monkeypatch.setattr("batchrun.report.tracking.find_spec", lambda name: None)
    job = echo_job(63)
    with pytest.raises(UsageError, match=f"^--track {tracker} needs its library: pip install"):
        run(job, track=tracker)
    assert not (job.folder / "out.batchrun").exists()
