"""A model is exported once, whole or not at all. In place of the Python that does it stands a few lines of shell."""

from collections.abc import Callable
from pathlib import Path

import pytest

from batchrun_jobs.bench.openvino_ir import ExportFailedError, export

Fake = Callable[[str], str]


@pytest.fixture
def python(tmp_path: Path) -> Fake:
    """A program that writes down its arguments and goes on with `then`, where $FOLDER is the last of them."""

    def make(then: str) -> str:
        program = tmp_path / "python"
        told = f'echo "$@" >> {tmp_path}/told\nfor FOLDER; do :; done\n'
        program.write_text(f"#!/bin/sh\n{told}{then}\n", encoding="utf-8")
        program.chmod(0o755)
        return str(program)

    return make


def test_a_model_is_exported_once(python: Fake, tmp_path: Path) -> None:
    program = python('mkdir "$FOLDER" && echo model > "$FOLDER/model.xml"')
    first, second = (export(tmp_path / "model", "a1b2", program, tmp_path / "cache") for _ in range(2))
    assert first == second
    assert (first / "model.xml").read_text() == "model\n"
    (told,) = (tmp_path / "told").read_text().splitlines()
    assert f"export openvino --model {tmp_path / 'model'} " in told
    assert "--weight-format fp32" in told


def test_half_an_export_is_none(python: Fake, tmp_path: Path) -> None:
    program = python('mkdir -p "$FOLDER/half"; echo "no space left" >&2; exit 1')
    with pytest.raises(ExportFailedError, match=r"cannot export the model \(no space left\)"):
        export(tmp_path / "model", "a1b2", program, tmp_path / "cache")
    exported = export(tmp_path / "model", "a1b2", python('mkdir "$FOLDER"'), tmp_path / "cache")
    assert list(exported.iterdir()) == []
