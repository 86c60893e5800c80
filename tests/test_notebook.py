"""The notebook in `examples/` runs as it is, and in a kernel an interrupt is a pause."""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jupyter_client.manager import KernelManager, start_new_kernel
from nbclient import NotebookClient

from tests.run.conftest import echo_text, environment

EXAMPLES = Path(__file__).parents[1] / "examples"
MAX_S = 240


@pytest.fixture(autouse=True)
def jupyters_own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))


def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    for name in ("reviews.parquet", "triage.j2"):
        shutil.copy(EXAMPLES / name, tmp_path)
    notebook = nbformat.read(EXAMPLES / "scoring.ipynb", as_version=4)
    NotebookClient(notebook, timeout=MAX_S, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [shown_html(cell) for cell in notebook.cells if cell.cell_type == "code"]
    for html, column in zip(shown, ["stars", "label_prob", "perplexity", "cosine", "result", "label"], strict=True):
        assert column in html
    shows_a_bar = ["application/vnd.jupyter.widget-view+json" in str(cell.outputs) for cell in notebook.cells[3:9:2]]
    assert shows_a_bar == [True, True, True]
    assert "<tr><th>rows</th><td>40</td></tr><tr><th>failed</th><td>none</td></tr>" in shown[4]
    assert pq.read_table(tmp_path / "out" / "sentiment").num_rows == 40


def test_the_notebook_is_stored_without_outputs() -> None:
    notebook = nbformat.read(EXAMPLES / "scoring.ipynb", as_version=4)
    assert [cell.outputs for cell in notebook.cells if cell.cell_type == "code" and cell.outputs] == []


def shown_html(cell: Any) -> str:
    """The table that a cell ends with."""
    return "".join(output.data["text/html"] for output in cell.outputs if output.output_type == "execute_result")


class Kernel:
    """A kernel, and what its cells came to."""

    def __init__(self, manager: KernelManager, client: Any) -> None:
        self.manager = manager
        self.client = client

    def run(self, code: str) -> Any:
        """The reply to a cell: `status`, and the error's name and text."""
        return self.reply_to(self.client.execute(code))

    def reply_to(self, message_id: str) -> Any:
        while (reply := self.client.get_shell_msg(timeout=MAX_S))["parent_header"]["msg_id"] != message_id:
            pass
        return reply["content"]


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    manager, client = start_new_kernel(startup_timeout=MAX_S, cwd=str(tmp_path), env=environment())
    yield Kernel(manager, client)
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def test_an_interrupted_cell_saves_its_rows_and_run_again_goes_on(tmp_path: Path, kernel: Kernel) -> None:
    prompts = [f"What of {number}?" for number in range(3000)]
    pq.write_table(pa.table({"prompt": prompts}), tmp_path / "in.parquet")
    cell = (
        "import batchrun as br\n"
        "job = br.submit('in.parquet', output='out', model='echo', max_tokens=40, max_num_seqs=4,\n"
        "                checkpoint_every='0.1s', drain_timeout='0.1s')\n"
        "assert not job.already_complete and job.rows == 3000"
    )
    running = kernel.client.execute(cell)
    parts = tmp_path / "out.batchrun" / "parts"
    began = time.monotonic()
    while not list(parts.glob("*.parquet")):
        assert time.monotonic() - began < MAX_S
        time.sleep(0.01)
    kernel.manager.interrupt_kernel()
    reply = kernel.reply_to(running)
    assert (reply["status"], reply["ename"]) == ("error", "StoppedByUser")
    assert "the same command goes on from here" in reply["evalue"]
    done = sum(pq.read_metadata(part).num_rows for part in parts.glob("*.parquet"))
    assert 0 < done < 3000
    kept = {part.name for part in parts.glob("*.parquet")}
    # Ctrl-C is the kernel's own again once the job is over.
    handler = "import signal; assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    assert kernel.run(handler)["status"] == "ok"
    assert kernel.run(cell)["status"] == "ok"
    assert kept <= {part.name for part in parts.glob("*.parquet")}
    answered = pq.read_table(tmp_path / "out").column("text").to_pylist()
    assert answered == [echo_text(prompt, 40) for prompt in prompts]
