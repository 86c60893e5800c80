"""Kills a job with SIGKILL at random moments and resumes it, again and again, beside one that nobody disturbs.

    python -m tests.endurance.kills prompts.parquet --kills 20 --between 1 6 -- -m echo --max-tokens 60

What stands behind `--` goes to `batchrun submit`. A moment counts from the start of the process; one before the first
step is a kill too. The results are compared byte for byte. Exit status 1: a row was lost, doubled or altered, or a
process lost more than it had done since its last checkpoint.
"""

import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import click
import pyarrow.parquet as pq

from batchrun.store import partial
from batchrun.store.layout import Layout


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
    return [
        sys.executable, "-m", "batchrun", "submit", str(source), "-o", str(out), "--progress", "none", *arguments,
    ]  # fmt: skip


def kill_after(seconds: float, arguments: list[str]) -> bool:
    """Whether there was something to kill."""
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return True
    return False


def result(out: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(out.iterdir())}


@click.command()
@click.argument("source", type=click.Path(exists=True, path_type=Path))
@click.argument("arguments", nargs=-1)
@click.option("--kills", default=20, show_default=True)
@click.option("--between", nargs=2, type=float, default=(1.0, 6.0), show_default=True, help="Seconds after the start.")
@click.option("--seed", default=1, show_default=True)
def main(source: Path, arguments: tuple[str, ...], kills: int, between: tuple[float, float], seed: int) -> None:
    """Print a line for each kill, and whether the results are the same."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as scratch:
        undisturbed, killed = Path(scratch, "undisturbed"), Path(scratch, "killed")
        subprocess.run(command(source, undisturbed, arguments), check=True, stdout=subprocess.DEVNULL)
        before, longest_s = Saved(frozenset(), {}, 0.0), 0.0
        for number in range(kills):
            seconds = rng.uniform(*between)
            if not kill_after(seconds, command(source, killed, arguments)):
                raise SystemExit(f"the job was done after {number} kills; give more rows, or earlier moments")
            at = time.time()
            saved = Saved.of(Layout(killed))
            saved.check_after(before)
            # Nothing saved in this run: it did not live until the first checkpoint, and lost all that it did.
            lost_s = min(at - saved.written, seconds) if saved.written else seconds
            longest_s = max(longest_s, lost_s)
            click.echo(
                f"kill {number + 1:3} after {seconds:5.2f} s: {len(saved.rows):7,} rows committed, "
                f"{len(saved.tokens):4} begun with {sum(saved.tokens.values()):6,} tokens saved, lost {lost_s:4.2f} s"
            )
            before = saved
        subprocess.run(command(source, killed, arguments), check=True, stdout=subprocess.DEVNULL)
        Saved.of(Layout(killed)).check_after(before)
        verified = subprocess.run([sys.executable, "-m", "batchrun", "verify", str(killed)], check=False)
        is_same = result(undisturbed) == result(killed)
        click.echo(f"{kills} kills, at most {longest_s:.2f} s lost; {'byte-identical' if is_same else 'NOT the same'}")
        sys.exit(0 if is_same and not verified.returncode else 1)


if __name__ == "__main__":
    main()
