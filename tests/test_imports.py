"""Large imports leave the collector as it was, and nothing behind that complains when the process ends."""

import subprocess
import sys

import pytest

CODE = """
import gc, sys
from batchrun.imports import import_for_models, import_for_tokenizers
{before}
import_for_tokenizers()
assert "transformers" in sys.modules and "torch" in sys.modules
import_for_models()
print(gc.isenabled(), gc.get_freeze_count() > 100_000)
"""


@pytest.mark.parametrize("awake", [True, False])
def test_the_collector_is_as_it_was(awake: bool) -> None:
    code = CODE.format(before="" if awake else "gc.disable()")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout.strip(), done.stderr) == (f"{awake} True", "")
