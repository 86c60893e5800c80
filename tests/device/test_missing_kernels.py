"""A job that has to do without the C kernels says so once, with the reason and the remedy."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from batchrun.engine.model import Model
from batchrun_kernels import native
from tests.device.tiny_families import make_model


@pytest.fixture
def unknown_library() -> Iterator[None]:
    """Whether there is a library is looked up again, in the test and behind it."""
    native.find.cache_clear()
    yield
    native.find.cache_clear()


@pytest.mark.usefixtures("unknown_library")
def test_a_missing_library_is_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    assert Model.adopt(make_model("llama")).attention.name == "torch"
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        (
            "WARNING",
            "the CPU computes in plain torch, which is slower: "
            "the C kernels were not built; install a C compiler with OpenMP and reinstall",
        )
    ]


@pytest.mark.skipif(native.find() is None, reason="needs the C kernels: a C compiler at installation")
@pytest.mark.usefixtures("unknown_library")
def test_a_library_of_another_version_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was refused in silence, and jobs took twice as long."""
    monkeypatch.setattr(native, "_VERSION", 999)
    assert Model.adopt(make_model("llama")).attention.name == "torch"
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("the CPU computes in plain torch, which is slower: _native.")
    assert message.endswith("999 is needed; reinstall")


@pytest.mark.usefixtures("unknown_library")
def test_half_precision_needs_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    Model.adopt(make_model("llama").to(torch.bfloat16))
    assert caplog.records == []
