"""What rows wait for under each schedule, counted in tokens that the model computes: the same on every machine.

    python -m tests.engine.policy_table mixed.parquet --max-num-seqs 8 --max-num-batched-tokens 128

The file has `input_ids` and `max_new_tokens`; every row generates exactly as many. A step lasts as many units as it has
tokens, as it nearly does where arithmetic is the limit.
"""

from pathlib import Path
from typing import get_args

import click
import numpy as np
import pyarrow.parquet as pq

from batchrun.engine.echo import EchoRunner
from batchrun.engine.engine import Engine
from batchrun.engine.policies import Schedule
from batchrun.engine.request import Request, SamplingParams
from batchrun.engine.scheduler import SchedulerConfig
from batchrun.engine.step import Ended, ScheduledBatch

NO_LANE = 10**9  # tokens
WAYS = [
    *((schedule, {"schedule": schedule}) for schedule in get_args(Schedule)),
    ("chunked, aligned to 64", {"chunk_alignment_tokens": 64}),
    ("chunked, no lane", {"long_row_tokens": NO_LANE}),
]


class CountingRunner(EchoRunner):
    """Knows how many tokens it was given."""

    num_tokens = 0

    def launch(self, batch: ScheduledBatch) -> Ended:
        self.num_tokens += batch.num_tokens
        return super().launch(batch)


def run(requests: list[Request], **options: object) -> Engine:
    """Runs the rows to their end in a pool that holds them all."""
    blocks = sum(request.max_len // 16 + 1 for request in requests)
    runner = CountingRunner(blocks, 16)
    settings = {"num_host_slots": 0, "block_size": 16, "block_bytes": 128, "eos_token_ids": frozenset()} | options
    engine = Engine(SchedulerConfig(num_blocks=blocks, **settings), runner, lambda ids: "", lambda: runner.num_tokens)
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    return engine


@click.command()
@click.argument("source", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--max-num-seqs", default=128, show_default=True)
@click.option("--max-num-batched-tokens", default=512, show_default=True)
def main(source: Path, **limits: int) -> None:
    """Print a line for each way of sharing out a step."""
    rows = sorted(
        zip(*pq.read_table(source, columns=["input_ids", "max_new_tokens"]).to_pydict().values(), strict=True)
    )
    requests = [
        Request(row_idx, np.array(ids, dtype=np.int32), SamplingParams(max_tokens=length, ignore_eos=True))
        for row_idx, (ids, length) in enumerate(rows)
    ]
    click.echo(f"{'':24}{'steps':>7}{'tokens':>8}   first token p50   p90   p99   per token p50   p90   p99")
    for name, options in WAYS:
        engine = run(requests, **limits, **options)
        counters, measured = engine.statistics().counters, engine.latencies()
        first, per_token = (
            "".join(f"{histogram.percentile(percent):6.0f}" for percent in (50, 90, 99))
            for histogram in (measured.first_token, measured.per_token)
        )
        click.echo(f"{name:24}{counters.steps:7}{counters.computed_tokens:8}{first:>33}{per_token:>28}")


if __name__ == "__main__":
    main()
