"""Kills a job with SIGKILL at random moments and resumes it, again and again, beside one that nobody disturbs.

    python -m tests.endurance.kills prompts.parquet --kills 20 --between 1 6 -- -m echo --max-tokens 60

What stands behind `--` goes to `batchrun submit`. A moment counts from the start of the command, which runs in a fork
of this process; one before the first step is a kill too. When a job is done, its result is compared byte for byte, and
the same job begins anew. Exit status 1: a row was lost, doubled or altered, or saved tokens were. A thousand kills:

    python -m tests.endurance.kills examples/reviews.parquet --kills 1000 --between 0 0.6 --quiet -- -m echo \
        --prompt-col review --max-tokens 40 --max-num-seqs 8 --max-num-batched-tokens 512 --checkpoint-every 0.02s
"""

import os
import random
import shutil
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import click
import pyarrow.parquet as pq

from batchrun.store import partial
from batchrun.store.layout import Layout
from tests.endurance import forked


@dataclass(frozen=True)
class Saved:
    """What of a job a kill cannot take: committed rows, tokens of unfinished ones, and when that was last written."""

    rows: frozenset[int]
    tokens: dict[int, int]
    written: float

    @classmethod
    def of(cls, at: Layout) -> "Saved":
        """Raises AssertionError: a row is in two parts."""
        paths = [part.path for part in at.list_parts()]
        rows = [row for path in paths for row in pq.read_table(path, columns=["row_idx"]).column(0).to_pylist()]
        assert len(rows) == len(set(rows)), "a row is in two parts"
        tokens = {row: len(ids) for row, ids in partial.load(at).items()}
        if at.partial.exists():
            paths.append(at.partial)
        return cls(frozenset(rows), tokens, max((path.stat().st_mtime for path in paths), default=0.0))

    def check_after(self, before: "Saved") -> None:
        """Raises AssertionError: something that was saved before is not any more."""
        assert before.rows <= self.rows, f"committed rows were lost: {sorted(before.rows - self.rows)}"
        lost = {
            row: (num_tokens, self.tokens.get(row, 0))
            for row, num_tokens in before.tokens.items()
            if row not in self.rows and self.tokens.get(row, 0) < num_tokens
        }
        assert not lost, f"saved tokens were lost, row: (before, after) {lost}"


def command(source: Path, out: Path, arguments: tuple[str, ...]) -> list[str]:
    return ["submit", str(source), "-o", str(out), "--progress", "none", *arguments]


def result(out: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(out.iterdir())}


NOTHING = Saved(frozenset(), {}, 0.0)


class Killed:
    """A job under fire: what was saved when it was killed last, and how often it has ended all the same."""

    def __init__(self, source: Path, out: Path, arguments: tuple[str, ...], expected: dict[str, bytes]) -> None:
        self._command = command(source, out, arguments)
        self._said = out.with_name("said")
        self._expected = expected
        self.at = Layout(out)
        self.saved = NOTHING
        self.num_ended = 0

    def kill_after(self, seconds: float) -> bool:
        """Whether there was something to kill; a job that ended is compared and begins anew."""
        child = forked.start(self._command, self._said)
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
        ended = forked.wait(child, self._said)
        assert ended.is_killed or ended.exit_code == 0, ended
        now = Saved.of(self.at)
        now.check_after(self.saved)
        self.saved = now
        if ended.exit_code == 0:
            self._compare()
        return ended.is_killed

    def finish(self) -> None:
        """Runs the job to its end."""
        ended = forked.run(self._command, self._said)
        assert ended.exit_code == 0, ended
        Saved.of(self.at).check_after(self.saved)
        self._compare()

    def _compare(self) -> None:
        verified = forked.run(["verify", str(self.at.out)], self._said)
        assert verified.exit_code == 0, verified
        assert result(self.at.out) == self._expected, "the result is another one"
        for folder in (self.at.out, self.at.folder):
            shutil.rmtree(folder)
        self.saved = NOTHING
        self.num_ended += 1


@click.command()
@click.argument("source", type=click.Path(exists=True, path_type=Path))
@click.argument("arguments", nargs=-1)
@click.option("--kills", default=20, show_default=True)
@click.option("--between", nargs=2, type=float, default=(1.0, 6.0), show_default=True, help="Seconds after the start.")
@click.option("--seed", default=1, show_default=True)
@click.option("--quiet", is_flag=True, help="No line for each kill.")
def main(
    source: Path, arguments: tuple[str, ...], kills: int, between: tuple[float, float], seed: int, quiet: bool
) -> None:
    """Print a line for each kill, and whether the results are the same."""
    rng, began = random.Random(seed), time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        undisturbed = Path(scratch, "undisturbed")
        ended = forked.run(command(source, undisturbed, arguments), Path(scratch, "said"))
        assert ended.exit_code == 0, ended
        job = Killed(source, Path(scratch, "killed"), arguments, result(undisturbed))
        longest_s, number, moments = 0.0, 0, {"planning": 0, "running": 0}
        while number < kills:
            seconds = rng.uniform(*between)
            if not job.kill_after(seconds):
                continue
            number += 1
            moments["running" if job.at.plan.exists() else "planning"] += 1
            # Nothing saved in this run: it did not live until the first checkpoint, and lost all that it did.
            lost_s = min(time.time() - job.saved.written, seconds) if job.saved.written else seconds
            longest_s = max(longest_s, lost_s)
            if not quiet:
                saved = job.saved
                click.echo(
                    f"kill {number:3} after {seconds:5.2f} s: {len(saved.rows):7,} rows committed, "
                    f"{len(saved.tokens):4} begun with {sum(saved.tokens.values()):6,} tokens saved, "
                    f"lost {lost_s:4.2f} s"
                )
        job.finish()
    click.echo(
        f"{kills:,} kills ({moments['planning']:,} before there was a plan) of {job.num_ended:,} jobs in "
        f"{time.perf_counter() - began:.0f} s, at most {longest_s:.2f} s lost; no row lost, doubled or altered"
    )


if __name__ == "__main__":
    main()
