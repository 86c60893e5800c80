"""The command in a fork of this process, which has imported everything: a whole job in a few milliseconds.

The parent computes nothing itself, so that there is no thread and no lock that a fork could inherit half.
"""

import gc
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import duckdb  # noqa: F401
import pyarrow.parquet  # noqa: F401

import batchrun.cli_run
import batchrun.cli_status
import batchrun.executors.local
import batchrun.lifecycle
import batchrun.report.report
import batchrun.retry
import batchrun.reuse
import batchrun.running
import batchrun.store.listing
import batchrun.store.status
import batchrun.store.verify  # noqa: F401
from batchrun.cli import batchrun as command
from batchrun.report import page

page.template()


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended: its exit code, or minus the signal that killed it, and what it said on stderr."""

    exit_code: int
    said: str

    @property
    def is_killed(self) -> bool:
        return self.exit_code == -signal.SIGKILL


def import_engine() -> None:
    """What a job with weights imports besides, so that forks need not. Computes nothing: threads would not survive."""
    import transformers.modeling_utils
    import transformers.models.llama.modeling_llama  # noqa: F401

    import batchrun.engine.runner  # noqa: F401


def start(arguments: Sequence[str], said: Path, prepare: Callable[[], None] = lambda: None) -> int:
    """Begins `batchrun arguments…` in a child; its stderr goes to the file `said`. The child's process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    if child := os.fork():
        return child
    try:
        stderr = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        stdout = os.open(os.devnull, os.O_WRONLY)
        os.dup2(stderr, 2)
        os.dup2(stdout, 1)
        # What is there now stays; looking through it again and again would take half of the time.
        gc.freeze()
        prepare()
        command(list(arguments), prog_name="batchrun")
    except SystemExit as ended:
        sys.stderr.flush()
        os._exit(ended.code if isinstance(ended.code, int) else 1)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        sys.stderr.flush()
    os._exit(1)


def is_running(child: int) -> bool:
    """Whether the child has not ended; leaves an ended one to `wait`."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def is_paused(child: int) -> bool:
    """Waits until the child has ended or was stopped; whether it can be woken. Leaves an ended one to `wait`."""
    ended = os.waitid(os.P_PID, child, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    assert ended is not None
    return ended.si_code == os.CLD_STOPPED


def wait(child: int, said: Path) -> Ended:
    """Waits until the child has ended."""
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return Ended(code, said.read_text() if said.exists() else "")


def run(arguments: Sequence[str], said: Path, prepare: Callable[[], None] = lambda: None) -> Ended:
    """`batchrun arguments…` from beginning to end."""
    return wait(start(arguments, said, prepare), said)
