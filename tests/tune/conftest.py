"""Jobs on the model without weights, in a cache of their own."""

from pathlib import Path

import pytest

from tests.run.conftest import echo_job as echo_job


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one, so that what was measured on this machine has no part in the tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "batchrun"
