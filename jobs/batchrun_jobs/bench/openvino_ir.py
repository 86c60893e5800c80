"""A model in OpenVINO's own format, exported once by the Python that has optimum-intel and kept in the user's cache."""

import shutil
import subprocess
from pathlib import Path


class ExportFailedError(Exception):
    """The message says what to do."""


def export(model: Path, digest: str, python: str, cache: Path) -> Path:
    """The folder of the exported float32 model; `digest` names `model`'s contents. Raises ExportFailedError."""
    exported = cache / "openvino" / digest
    if exported.exists():
        return exported
    half = exported.with_suffix(".partial")
    shutil.rmtree(half, ignore_errors=True)
    half.parent.mkdir(parents=True, exist_ok=True)
    command = [python, "-m", "optimum.commands.optimum_cli", "export", "openvino", "--model", str(model)]
    command += ["--task", "text-generation-with-past", "--weight-format", "fp32", str(half)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip() or "no reason given").splitlines()[-1]
        raise ExportFailedError(
            f"optimum-intel cannot export the model ({last}); export it in another way and name it: openvino:ir=FOLDER"
        )
    half.rename(exported)
    return exported
