"""Jobs on the model without weights: whole runs in a second, with answers that are known in advance."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from batchrun import lifecycle
from batchrun.cli import batchrun
from batchrun.engine.echo import EOS_TOKEN_ID, answer
from batchrun.job import Job
from batchrun.observe.events import Event
from batchrun.outcome import Outcome
from batchrun.stop import StopRequest
from batchrun.tokenizer import EchoTokenizer

MEAN_OUTPUT_LEN = 24
INSTRUCTION = "You answer questions about numbers. Be brief and exact.\n\n"


def echo_text(prompt: str, max_tokens: int) -> str:
    """What the model `echo` answers."""
    tokenizer = EchoTokenizer()
    ids = tokenizer.encode([prompt], add_special_tokens=True)[0]
    return tokenizer.decode(answer(ids, max_tokens, MEAN_OUTPUT_LEN, {EOS_TOKEN_ID}))


@dataclass(frozen=True)
class EchoJob:
    """A folder with an input, and ways to run it."""

    folder: Path
    prompts: list[str]

    @property
    def source(self) -> Path:
        return self.folder / "input.parquet"

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def job(self, **options: object) -> Job:
        return Job.load({"inputs": (str(self.source),), "output": str(self.out), "model": "echo", **options})

    def submit(self, request: StopRequest | None = None, **options: object) -> Outcome:
        return lifecycle.submit(self.job(**options), ignore, request or StopRequest())

    def command(self, *arguments: str) -> list[str]:
        here = [sys.executable, "-m", "batchrun", *arguments[:1]]
        if arguments[0] == "submit":
            here += [str(self.source), "-m", "echo", "-o", str(self.out)]
        return [*here, *arguments[1:]]

    def call(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The command as it is typed, in this process: one of its own takes a second to begin."""
        return typed(*self.command(*arguments)[3:])

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The same in a process of its own."""
        return subprocess.run(self.command(*arguments), capture_output=True, text=True, check=False, env=environment())

    def start(self, *arguments: str, **options: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            **options,
        )

    def rows(self) -> list[dict[str, object]]:
        files = sorted(self.out.glob("*.parquet"))
        return pa.concat_tables([pq.read_table(file) for file in files]).to_pylist()

    def result(self) -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in sorted(self.out.iterdir())}


def typed(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What `batchrun …` says in this process, and the exit code that it would end with."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        ended = CliRunner().invoke(batchrun, arguments, prog_name="batchrun", catch_exceptions=False)
    finally:
        # A job that was stopped hears no signal any more, on its way out.
        for number, handler in before.items():
            signal.signal(number, handler)
    return subprocess.CompletedProcess(arguments, ended.exit_code, ended.stdout, ended.stderr)


def environment() -> dict[str, str]:
    """This process's, so that a child imports the same code."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def ignore(event: Event) -> None:
    """Nobody watches."""


@pytest.fixture
def echo_job(tmp_path: Path) -> Callable[[int], EchoJob]:
    """Makes a job with this many rows; every seventh prompt is a copy of an earlier one."""

    def make(num_rows: int, folder: Path = tmp_path) -> EchoJob:
        rng = np.random.default_rng(7)
        prompts = [f"{INSTRUCTION}What of {rng.integers(10**6)} and {number}?" for number in range(num_rows)]
        for at in range(7, num_rows, 7):
            prompts[at] = prompts[at // 2]
        folder.mkdir(exist_ok=True)
        pq.write_table(pa.table({"id": np.arange(num_rows) * 10, "prompt": prompts}), folder / "input.parquet")
        return EchoJob(folder, prompts)

    return make
