"""A job on an object store, killed at one of its requests again and again, and resumed on another machine every time.

    python -m tests.endurance.s3 --kills 20 -- examples/reviews.parquet --prompt-col review -m echo --max-tokens 40

What stands behind `--` goes to `batchrun submit`, on a disk first and then on a store that speaks S3's protocol on
loopback, where every process has a cache of its own, so that nothing but the store carries over. Two processes that
start at once are among them. In the end the two results are compared byte for byte. Exit status 1: a row was lost,
doubled or altered, a part was written twice, or two processes worked at once.
"""

import io
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import pyarrow.parquet as pq

from tests.s3 import S3, Application, Environ, running

BUCKET, NAME = "lake", "jobs/out"
URL = f"s3://{BUCKET}/{NAME}"


@dataclass
class Machines:
    """Processes that share nothing but the store; each machine's cache is gone with it."""

    store: S3
    scratch: Path
    arguments: Sequence[str]
    number: int = 0
    caches: list[Path] = field(default_factory=list)

    def start(self) -> subprocess.Popen[str]:
        """The job on a machine that was never there before."""
        self.number += 1
        self.caches.append(self.scratch / f"machine-{self.number}")
        return self._begin("submit", *self.arguments, "-o", URL, "--progress", "none", "--quiet")

    def call(self, *arguments: str) -> None:
        process = self._begin(*arguments)
        _, said = process.communicate()
        assert process.returncode == 0, said

    def clear(self) -> None:
        while self.caches:
            shutil.rmtree(self.caches.pop(), ignore_errors=True)

    def _begin(self, *arguments: str) -> subprocess.Popen[str]:
        # Only models are found where they always are.
        home = self.caches[-1] if self.caches else self.scratch / "machine-0"
        command = [sys.executable, "-m", "batchrun", *arguments]
        environment = os.environ | self.store.environment | {"XDG_CACHE_HOME": str(home)}
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def parts(store: S3) -> dict[str, bytes]:
    keys = [key for key in store.keys(BUCKET, f"{NAME}.batchrun/") if "/parts/" in key]
    return {key: store.read(BUCKET, key) for key in keys}


def rows(found: dict[str, bytes]) -> list[int]:
    return [row for each in found.values() for row in pq.read_table(io.BytesIO(each)).column(0).to_pylist()]


def kill(machines: Machines, at_request: int, is_done: bool, before: dict[str, bytes]) -> dict[str, bytes]:
    """One process, killed at one of its requests, which the store has then done or not; the parts that are there now.

    These must be those of before and new ones.
    """
    store, started = machines.store, len(machines.store.requests)

    def kill_in_time(environ: Environ, application: Application, start: Any) -> Iterable[bytes]:
        is_due = len(store.requests) - started == at_request
        if is_due and not is_done:
            process.kill()
        answer = list(application(environ, start))
        if is_due and is_done:
            process.kill()
        return answer

    process = machines.start()
    store.spoil = kill_in_time
    _, said = process.communicate()
    store.spoil = None
    assert process.returncode in (0, -signal.SIGKILL), said
    machines.clear()
    found = parts(store)
    assert before.items() <= found.items(), "a committed part was lost or altered"
    done = rows(found)
    assert len(done) == len(set(done)), "a row is in two parts"
    return found


def race(machines: Machines) -> list[int]:
    """Two processes at once; their exit codes. One works, the other is turned away or comes after it."""
    processes = [machines.start() for _ in range(2)]
    for process in processes:
        process.communicate()
    return sorted(process.returncode for process in processes)


@click.command()
@click.argument("arguments", nargs=-1, required=True)
@click.option("--kills", default=10, show_default=True)
@click.option("--between", nargs=2, type=int, default=(1, 120), show_default=True, help="Which request is the last.")
@click.option("--seed", default=1, show_default=True)
def main(arguments: tuple[str, ...], kills: int, between: tuple[int, int], seed: int) -> None:
    """Print a line for each kill, and whether the result is the one of a job on a disk."""
    rng, began = random.Random(seed), time.perf_counter()
    with running() as store, tempfile.TemporaryDirectory() as scratch:
        store.client.create_bucket(Bucket=BUCKET)
        machines = Machines(store, Path(scratch), arguments)
        undisturbed = Path(scratch, "undisturbed")
        machines.call("submit", *arguments, "-o", str(undisturbed), "--quiet", "--progress", "none")
        found: dict[str, bytes] = {}
        for number in range(1, kills + 1):
            at_request, is_done = rng.randint(*between), rng.random() < 0.5
            found = kill(machines, at_request, is_done, found)
            click.echo(
                f"kill {number:3} {'behind' if is_done else 'before'} request {at_request:4}: "
                f"{len(rows(found)):7,} rows in {len(found):4} parts"
            )
        codes = race(machines)
        assert 0 in codes, codes
        assert set(codes) <= {0, 75}, codes
        click.echo(f"two processes at once ended with {codes}")
        machines.call("verify", URL)
        expected = {file.name: file.read_bytes() for file in sorted(undisturbed.iterdir())}
        assert store.files(BUCKET, NAME) == expected, "the result is another one"
    click.echo(
        f"{kills} kills, {machines.number} machines, {len(store.requests):,} requests, "
        f"{time.perf_counter() - began:.0f} s; published, and byte for byte the result of a job on a disk"
    )


if __name__ == "__main__":
    main()
