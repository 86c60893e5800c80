"""The files to copy, each before the nearest real tool: crontab, systemd-analyze, bash, shellcheck, a schema."""

import os
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from batchrun_jobs.submission import IN_VAIN
from tests.run.conftest import environment

TEMPLATES = Path(__file__).parents[2] / "jobs" / "templates"
# Python imports this before anything else. A job of a few hundred rows then takes minutes, in which it mostly sleeps.
STEPS_TAKE_LONG = """
import time
from batchrun.engine.echo import EchoRunner
launch = EchoRunner.launch
def launch_late(self, batch):
    time.sleep(0.5)
    return launch(self, batch)
EchoRunner.launch = launch_late
"""


def checked(program: str, *arguments: str | Path) -> str:
    """What the program says on stderr, having found nothing wrong."""
    if shutil.which(program) is None:
        pytest.skip(f"needs {program}")
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr


def copy(name: str, folder: Path, batchrun: str = "/srv/venv/bin/batchrun") -> Path:
    """A copy for a folder of one's own."""
    text = (TEMPLATES / name).read_text(encoding="utf-8")
    (folder / name).write_text(text.replace("/srv/reviews", str(folder)).replace("/srv/venv/bin/batchrun", batchrun))
    return folder / name


@pytest.fixture
def reviews(tmp_path: Path) -> Path:
    """A folder with an export and a `batchrun` that takes the model without weights."""
    pq.write_table(pa.table({"review": [f"Review {number}." for number in range(400)]}), tmp_path / "export.parquet")
    script = tmp_path / "batchrun"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m batchrun "$@" --model echo\n')
    script.chmod(0o755)
    return tmp_path


def command_of_cron() -> str:
    (line,) = [line for line in (TEMPLATES / "nightly.cron").read_text().splitlines() if line and line[0] != "#"]
    return line.split(maxsplit=5)[5]


def test_crontab_takes_the_cron_line() -> None:
    if shutil.which("crontab") is None:
        pytest.skip("needs crontab")
    usage = subprocess.run(["crontab", "-h"], capture_output=True, text=True, check=False)
    # Debian's crontab checks with -n, others with -T.
    dry_run = "-n" if "dry run" in usage.stdout + usage.stderr else "-T"
    checked("crontab", dry_run, TEMPLATES / "nightly.cron")


def test_the_cron_line_escapes_percent_signs() -> None:
    assert "%" not in command_of_cron().replace("\\%", "")


@pytest.mark.parametrize(("options", "said"), [("", ""), ("--prompt-col none", "batchrun exited 65, see ")])
def test_the_cron_line_says_only_what_a_person_must_know(reviews: Path, options: str, said: str) -> None:
    command = command_of_cron().replace("\\%", "%").replace("/srv/reviews", str(reviews))
    command = command.replace("/srv/venv/bin/batchrun", f"{reviews}/batchrun").replace(
        " --quiet", f" {options} --quiet"
    )
    for _ in range(2):
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False, env=environment())
        assert done.stdout.startswith(said)
        assert bool(done.stdout) == bool(said)


def test_systemd_takes_the_units(tmp_path: Path) -> None:
    units = [copy(name, tmp_path) for name in ("nightly.service", "nightly.timer")]
    assert checked("systemd-analyze", "verify", *units) == "", "as of a key that it does not know"


def test_systemd_does_not_try_again_what_is_wrong() -> None:
    lines = (TEMPLATES / "nightly.service").read_text().splitlines()
    assert f"RestartPreventExitStatus={' '.join(map(str, IN_VAIN))}" in lines


def test_bash_and_shellcheck_take_the_batch_script() -> None:
    checked("bash", "-n", TEMPLATES / "nightly.sbatch")
    checked("shellcheck", TEMPLATES / "nightly.sbatch")


def test_the_batch_script_passes_the_signal_on_and_is_queued_again(reviews: Path) -> None:
    """`scontrol` writes down what it was asked: there is no cluster here."""
    (reviews / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {reviews}/asked\n')
    (reviews / "scontrol").chmod(0o755)
    (reviews / "sitecustomize.py").write_text(STEPS_TAKE_LONG)
    slow = reviews / "slow"
    slow.write_text(f'#!/bin/sh\nexec {reviews}/batchrun "$@" --max-num-seqs 1 --drain-timeout 0s\n')
    slow.chmod(0o755)
    script = copy("nightly.sbatch", reviews, str(slow))
    variables = environment() | {"SLURM_JOB_ID": "7", "PATH": f"{reviews}:{os.environ['PATH']}"}
    variables["PYTHONPATH"] = f"{reviews}{os.pathsep}{variables['PYTHONPATH']}"
    process = subprocess.Popen(["bash", str(script)], env=variables, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if "stage=run" in line:
            break
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert (process.returncode, (reviews / "asked").read_text()) == (75, "requeue 7\n")


def test_kubernetes_takes_the_job() -> None:
    if find_spec("kubernetes_validate") is None:
        pytest.skip("needs kubernetes-validate")
    import kubernetes_validate

    job = loaded_job()
    kubernetes_validate.validate(job, kubernetes_validate.latest_version(), strict=True)
    job["spec"]["template"]["spec"]["restartPolcy"] = "Never"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, kubernetes_validate.latest_version(), strict=True)


def test_the_pod_has_longer_than_the_job_drains_and_fails_where_a_retry_is_in_vain() -> None:
    spec = loaded_job()["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    assert "45s" in container["args"]
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] > 45 + 15
    assert spec["template"]["spec"]["restartPolicy"] == "Never", "which a podFailurePolicy needs"
    final = [rule["onExitCodes"]["values"] for rule in spec["podFailurePolicy"]["rules"] if rule["action"] == "FailJob"]
    assert final == [[*IN_VAIN]]


def loaded_job() -> Any:
    return yaml.safe_load((TEMPLATES / "nightly-job.yaml").read_text(encoding="utf-8"))
