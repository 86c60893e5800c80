"""What the KV pool is used for, counted in tokens and steps: the same on every machine.

    python -m tests.engine.kv_table shared.parquet tree.parquet mixed.parquet

Each file has `input_ids` and `max_new_tokens`, the length at which a row ends; the scheduler does not know it, only the
longest one of the file. Four tables: how many of the tokens that a perfect prefix tree finds are found (also in a tree
of 20,000 rows made here); how many slots of the blocks in use are empty; what a pool costs that is smaller than the
rows' demand, beside one that admits a row only if it fits at its longest (careful); and what 8 samples of every row
take, beside samples that share nothing.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import click
import numpy as np
import pyarrow.parquet as pq

from batchrun.engine.engine import Engine
from batchrun.engine.radix import common_len
from batchrun.engine.request import Request, SamplingParams
from batchrun.engine.scheduler import SchedulerConfig
from batchrun.engine.statistics import Counters
from batchrun.engine.step import Ended, Sampled, ScheduledBatch

_EOS, _OTHER = 2, 7  # tokens
_BLOCK_SIZE = 16
_NUM_SAMPLES = 8
_ROWS_AHEAD = 512  # waiting in the engine, as a worker keeps them


@dataclass(frozen=True, slots=True)
class Workload:
    """Rows in plan order: row i of `requests` ends with its `lengths[i]`-th token."""

    name: str
    requests: tuple[Request, ...]
    lengths: tuple[int, ...]

    @property
    def most_hits(self) -> int:
        """Prompt tokens that rows share with the row before; the last one of a prompt is always computed."""
        return sum(min(before.keep_len, len(row.token_ids) - 1) for before, row in pairwise(self.requests))


@dataclass(frozen=True, slots=True)
class Used:
    """What a run took. `peak` is in blocks, `waste` the share of slots of blocks in use that held no token."""

    counters: Counters
    peak: int
    waste: float


class EndingRunner:
    """Computes nothing, and ends every row at its length."""

    overlaps = False

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self._lengths = lengths

    def launch(self, batch: ScheduledBatch) -> Ended:
        ends = [item.output_len + 1 >= self._lengths[item.sequence.request.row_idx] for item in batch.sampled]
        return Ended(Sampled(np.where(ends, _EOS, _OTHER).astype(np.int32)))

    def close(self) -> None:
        pass


def workload(name: str, rows: Iterable[tuple[list[int], int]]) -> Workload:
    """Rows of prompt and output length, put into plan order."""
    prompts, lengths = zip(*sorted(rows), strict=True)
    ids = [np.array(prompt, dtype=np.int32) for prompt in prompts]
    keep_lens = [*(common_len(one, other) for one, other in pairwise(ids)), 0]
    sampling = SamplingParams(max_tokens=max(lengths))
    requests = (Request(at, prompt, sampling, keep_lens[at]) for at, prompt in enumerate(ids))
    return Workload(name, tuple(requests), lengths)


def from_file(path: Path) -> Workload:
    columns = pq.read_table(path, columns=["input_ids", "max_new_tokens"]).to_pydict()
    return workload(path.stem, zip(*columns.values(), strict=True))


def made_tree(num_rows: int, seed: int = 0) -> Workload:
    """A system prompt, 25 documents behind it, 20 questions to each, and variants of these."""
    rng = np.random.default_rng(seed)

    def tokens(fewest: int, most: int) -> list[int]:
        return rng.integers(3, 49_000, rng.integers(fewest, most)).tolist()

    system, documents = tokens(100, 101), [tokens(200, 500) for _ in range(25)]
    questions = [system + document + tokens(20, 60) for document in documents for _ in range(20)]
    rows = ((questions[row % len(questions)] + tokens(5, 30), int(rng.integers(4, 32))) for row in range(num_rows))
    return workload(f"tree of {num_rows:,} rows", rows)


def sampled(work: Workload, num_samples: int) -> Workload:
    """The same rows, each so many times: neighbours, as the plan has them."""
    ids = [request.token_ids for request in work.requests for _ in range(num_samples)]
    keep_lens = [
        len(request.token_ids) if sample < num_samples - 1 else request.keep_len
        for request in work.requests
        for sample in range(num_samples)
    ]
    sampling = work.requests[0].sampling
    requests = tuple(
        Request(at, prompt, sampling, keep, num_samples=num_samples)
        for at, (prompt, keep) in enumerate(zip(ids, keep_lens, strict=True))
    )
    return Workload(work.name, requests, tuple(np.repeat(work.lengths, num_samples).tolist()))


def run(work: Workload, num_blocks: int | None, *, overcommits: bool = True, **options: object) -> Used:
    """Runs the rows to their end in a pool of so many blocks; None: one that holds them all.

    Unless it `overcommits`, a row enters only when it fits at its longest.
    """
    block_size = int(str(options.get("block_size", _BLOCK_SIZE)))
    everything = sum(request.max_len // block_size + 1 for request in work.requests)
    settings = {
        "num_host_slots": 0, "block_size": block_size, "block_bytes": 128, "eos_token_ids": frozenset({_EOS}),
        "max_num_seqs": 128, "max_num_batched_tokens": 512,
    } | options  # fmt: skip
    config = SchedulerConfig(num_blocks=num_blocks or everything, **settings)
    engine = Engine(config, EndingRunner(work.lengths), lambda ids: "", lambda: 0.0)
    if not overcommits:
        engine.scheduler.lengths.expected = lambda sampling, output_len: sampling.max_tokens
    blocks, rows = engine.scheduler.blocks, iter(work.requests)
    peak = num_allocated = num_empty = 0
    while _feed(engine, rows) or engine.has_work:
        engine.step()
        peak = max(peak, blocks.num_in_use)
        num_allocated += blocks.num_in_use * block_size
        running = engine.scheduler.running
        num_empty += sum(len(row.block_table) * block_size - row.num_computed for row in running)
    return Used(engine.statistics().counters, peak, num_empty / num_allocated)


def _feed(engine: Engine, rows: Iterator[Request]) -> bool:
    """Keeps rows waiting; whether there may be more."""
    while engine.num_waiting < _ROWS_AHEAD:
        row = next(rows, None)
        if row is None:
            return False
        engine.add(row)
    return True


def _hits(work: Workload) -> Iterator[str]:
    roomy = run(work, None)
    runs = [("all", roomy), ("twice the demand", run(work, 2 * roomy.peak)), ("the demand", run(work, roomy.peak))]
    for name, used in runs:
        found = used.counters.cached_tokens
        yield f"{work.name:24}{name:>20}{work.most_hits:>12,}{found:>12,}{found / work.most_hits:>9.1%}"


def _waste(work: Workload) -> str:
    return f"{work.name:24}" + "".join(f"{run(work, None, block_size=size).waste:>9.1%}" for size in (16, 32, 128))


def _shortage(work: Workload, demand: int) -> Iterator[str]:
    longest = -(-max(request.max_len for request in work.requests) // _BLOCK_SIZE)
    for share in (1.0, 0.5, 0.25):
        num_blocks = max(int(share * demand), longest)
        ours, careful = (run(work, num_blocks, overcommits=overcommits).counters for overcommits in (True, False))
        yield (
            f"{work.name:24}{num_blocks:>7,}{num_blocks / demand:>7.0%}{ours.steps:>9,}{careful.steps:>9,}"
            f"{_pace(ours):>10.1f}{_pace(careful):>9.1f}{ours.preemptions:>11,}"
            f"{ours.recomputed_tokens / ours.computed_tokens:>12.2%}"
        )


def _samples(work: Workload) -> str:
    several = sampled(work, _NUM_SAMPLES)
    shared, apart = (run(several, None, shares_prefixes=shares) for shares in (True, False))
    tokens = (used.counters.computed_tokens for used in (shared, apart))
    return f"{work.name:24}{shared.peak:>9,}{apart.peak:>10,}{1 - shared.peak / apart.peak:>8.1%}" + "".join(
        f"{one:>13,}" for one in tokens
    )


def _pace(counters: Counters) -> float:
    """Tokens of a step, without those that had been computed before."""
    return (counters.computed_tokens - counters.recomputed_tokens) / counters.steps


@click.command()
@click.argument("sources", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--rows", default=20_000, show_default=True, help="Of the tree that is made here; 0: none.")
def main(sources: tuple[Path, ...], rows: int) -> None:
    """Print four tables, a line for each pool."""
    works = [from_file(source) for source in sources]
    demands = [run(work, None).peak for work in works]
    click.echo(f"{'prefixes':24}{'pool':>20}{'shared':>12}{'found':>12}")
    for work in [*works, *([made_tree(rows)] if rows else [])]:
        for line in _hits(work):
            click.echo(line)
    click.echo(f"\n{'empty slots, blocks of':24}{16:>9}{32:>9}{128:>9}")
    for work in works:
        click.echo(_waste(work))
    click.echo(f"\n{'':24}{'':14}{'steps':>9}{'':9}{'tokens a step':>19}")
    click.echo(
        f"{'room':24}{'blocks':>7}{'demand':>7}{'ours':>9}{'careful':>9}{'ours':>10}{'careful':>9}"
        f"{'preempted':>11}{'recomputed':>12}"
    )
    for work, demand in zip(works, demands, strict=True):
        for line in _shortage(work, demand):
            click.echo(line)
    click.echo(
        f"\n{f'{_NUM_SAMPLES} samples a row':24}{'blocks':>9}{'unshared':>10}{'saved':>8}{'tokens':>13}{'unshared':>13}"
    )
    for work in works:
        click.echo(_samples(work))


if __name__ == "__main__":
    main()
