"""Kills a job with SIGKILL at random moments and resumes it, again and again, beside one that nobody disturbs.

    python -m tests.endurance.kills echo
    python -m tests.endurance.kills smollm2
    python -m tests.endurance.kills echo --kills 50 --verbose -- --max-tokens 60

A thousand kills of a model without weights, or fifty of the embedded one, on the example's reviews; what stands behind
`--` goes to `batchrun submit`. Each process is a fork of this one, which has imported the libraries and nothing else:
the weights are loaded anew each time. A moment lies anywhere in the time that the undisturbed job took from its fork
to its end. When a job is done, its result is compared byte for byte, and the same job begins anew. Exit status 1: a row
was lost, doubled or altered, saved tokens were lost, or a result is another one.
"""

import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import click
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from batchrun.store import partial
from batchrun.store.layout import Layout
from tests.endurance import forked

_EXAMPLES = Path(__file__).parents[2] / "examples"
_JOB = ("--progress", "none", "--temperature", "0.7", "--seed", "3")
_STAGES = ("planning", "loading", "running", "publishing", "complete")


@dataclass(frozen=True, slots=True)
class Target:
    """A job to kill, and how often."""

    arguments: tuple[str, ...]
    kills: int


_TARGETS = {
    "echo": Target(
        ("-m", "echo", "--prompt-col", "review", "--max-tokens", "40", "--max-num-seqs", "16",
         "--max-num-batched-tokens", "512", "--checkpoint-every", "0.02s"),
        1000,
    ),
    "smollm2": Target(
        ("--deterministic", "-t", str(_EXAMPLES / "triage.j2"), "--chat", "off", "--stop", "###", "--limit", "32",
         "--max-tokens", "24", "--max-num-seqs", "16", "--max-num-batched-tokens", "128", "--checkpoint-every", "0.2s"),
        50,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Saved:
    """What of a job a kill cannot take: committed rows with their texts, and tokens of unfinished ones."""

    rows: dict[int, str | None]
    doubled: int
    tokens: dict[int, int]

    @classmethod
    def of(cls, at: Layout) -> "Saved":
        paths = [part.path for part in at.list_parts()]
        tables = [pq.read_table(path, columns=["row_idx", "text"]).to_pydict() for path in paths]
        rows = {row: text for one in tables for row, text in zip(one["row_idx"], one["text"], strict=True)}
        doubled = sum(len(one["row_idx"]) for one in tables) - len(rows)
        return cls(rows, doubled, {row: len(ids) for row, ids in partial.load(at).items()})


@dataclass(slots=True)
class Tally:
    """What was counted over all kills; all but `stages` and `ended` should be 0."""

    stages: Counter[str] = field(default_factory=Counter)
    ended: int = 0
    lost: int = 0
    doubled: int = 0
    altered: int = 0
    tokens_lost: int = 0  # rows of which fewer tokens are saved than before
    other_bytes: int = 0
    failed: int = 0  # processes that ended by themselves, and not well

    @property
    def is_clean(self) -> bool:
        wrong = self.lost, self.doubled, self.altered, self.tokens_lost, self.other_bytes, self.failed
        return not any(wrong) and self.ended > 0

    def compare(self, before: Saved, now: Saved, expected: dict[int, str | None]) -> None:
        """Counts what a process has spoilt."""
        self.lost += len(before.rows.keys() - now.rows.keys())
        self.doubled += now.doubled
        self.altered += sum(text != expected[row] for row, text in now.rows.items())
        self.tokens_lost += sum(
            row not in now.rows and now.tokens.get(row, 0) < num_tokens for row, num_tokens in before.tokens.items()
        )

    def table(self) -> str:
        lines = [f"{'killed while':12}  kills", *(f"{stage:12}  {self.stages[stage]:5,}" for stage in _STAGES)]
        return "\n".join([
            *lines, f"{'all':12}  {self.stages.total():5,}", "",
            f"{self.ended:,} jobs ended; rows lost {self.lost}, doubled {self.doubled}, altered {self.altered}; rows "
            f"whose saved tokens were lost {self.tokens_lost}; results with other bytes {self.other_bytes}; processes "
            f"that failed {self.failed}",
        ])  # fmt: skip


NOTHING = Saved({}, 0, {})


class Killed:
    """A job under fire in the folder `scratch`, and what came of it."""

    def __init__(self, source: Path, scratch: Path, arguments: tuple[str, ...]) -> None:
        self._said = scratch / "said"
        undisturbed, began = scratch / "undisturbed", time.perf_counter()
        ended = forked.run(command(source, undisturbed, arguments), self._said)
        assert ended.exit_code == 0, ended
        self.undisturbed_s = time.perf_counter() - began
        self._expected = files(undisturbed)
        rows = ds.dataset(undisturbed).to_table(columns=["row_idx", "text"]).to_pydict()
        self._texts: dict[int, str | None] = dict(zip(rows["row_idx"], rows["text"], strict=True))
        self.at = Layout(scratch / "killed")
        self._command = command(source, self.at.out, arguments)
        self._saved = NOTHING
        self.tally = Tally()

    def kill_after(self, seconds: float) -> str:
        """The stage in which it was killed; empty when it had ended before. One that has ended begins anew."""
        said_before = self._num_said()
        child = forked.start(self._command, self._said)
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
        ended = forked.wait(child, self._said)
        self._look()
        if ended.is_killed:
            stage = self._stage(said_before)
            self.tally.stages[stage] += 1
            return stage
        self._end(ended)
        return ""

    def finish(self) -> None:
        """Runs the job to its end."""
        ended = forked.run(self._command, self._said)
        self._look()
        self._end(ended)

    def __str__(self) -> str:
        saved = self._saved
        return f"{len(saved.rows):4,} rows committed, {sum(saved.tokens.values()):6,} tokens of others saved"

    def _look(self) -> None:
        now = Saved.of(self.at)
        self.tally.compare(self._saved, now, self._texts)
        self._saved = now

    def _stage(self, said_before: int) -> str:
        if self.at.is_complete:
            return "complete"
        if len(self._saved.rows) == len(self._texts):
            return "publishing"
        if not self.at.plan.exists():
            return "planning"
        return "running" if self._num_said() > said_before else "loading"

    def _num_said(self) -> int:
        """Bytes in the job's series, to which a process adds when its model is loaded."""
        return self.at.series.stat().st_size if self.at.series.exists() else 0

    def _end(self, ended: forked.Ended) -> None:
        if ended.exit_code:
            click.echo(f"exit {ended.exit_code}: {ended.said}")
            self.tally.failed += 1
            return
        verified = forked.run(["verify", str(self.at.out)], self._said)
        self.tally.failed += verified.exit_code != 0
        self.tally.other_bytes += files(self.at.out) != self._expected
        self.tally.ended += 1
        for folder in (self.at.out, self.at.folder):
            shutil.rmtree(folder)
        self._saved = NOTHING


def command(source: Path, out: Path, arguments: tuple[str, ...]) -> list[str]:
    return ["submit", str(source), "-o", str(out), *_JOB, *arguments]


def files(out: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(out.iterdir())}


@click.command()
@click.argument("target", type=click.Choice(list(_TARGETS)))
@click.argument("arguments", nargs=-1)
@click.option("--source", default=_EXAMPLES / "reviews.parquet", type=click.Path(exists=True, path_type=Path))
@click.option("--kills", type=int, help="Default: 1000 of echo, 50 of smollm2.")
@click.option("--seed", default=1, show_default=True)
@click.option("--verbose", is_flag=True, help="A line for each kill.")
def main(
    target: str,
    arguments: tuple[str, ...],
    source: Path,
    kills: int | None,
    seed: int,
    verbose: bool,
) -> None:
    """Print in which stages the job was killed, and what came of it."""
    chosen, rng, began = _TARGETS[target], random.Random(seed), time.perf_counter()
    if target != "echo":
        forked.import_engine()
    with tempfile.TemporaryDirectory() as scratch:
        job = Killed(source, Path(scratch), (*chosen.arguments, *arguments))
        while job.tally.stages.total() < (kills or chosen.kills) and not job.tally.failed:
            seconds = rng.uniform(0, job.undisturbed_s)
            stage = job.kill_after(seconds)
            if verbose and stage:
                click.echo(f"kill {job.tally.stages.total():4} after {seconds:5.2f} s, {stage:10} {job}")
        job.finish()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    click.echo(job.tally.table())
    click.echo(f"{time.perf_counter() - began:.0f} s, {used.ru_utime + used.ru_stime:.0f} s of processor time")
    sys.exit(0 if job.tally.is_clean else 1)


if __name__ == "__main__":
    main()
