"""Drives a scheduler by hand: small pools, and every sampled token is the same."""

import numpy as np

from batchrun.engine.request import Request, SamplingParams
from batchrun.engine.scheduler import Scheduler, SchedulerConfig
from batchrun.engine.step import Sampled


def scheduler(**options):
    settings = {
        "num_blocks": 100, "num_host_slots": 0, "block_size": 4, "block_bytes": 64, "max_num_seqs": 8,
        "max_num_batched_tokens": 16, "eos_token_ids": frozenset({2}),
    } | options  # fmt: skip
    return Scheduler(SchedulerConfig(**settings))


def request(row_idx, tokens, max_tokens=4, **options):
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Request(row_idx, np.array(tokens, dtype=np.int32), sampling, **options)


def launch(engine):
    """A step whose tokens stay unknown; the batch, and what takes its tokens in and names the finished rows."""
    batch = engine.schedule()

    def land(token=7):
        sampled = Sampled(np.full(len(batch.sampled), token, dtype=np.int32))
        finished = engine.update(batch, sampled, find_stop=lambda sequence: None)
        engine.check()
        return [row.row_idx for row in finished]

    return batch, land


def tokens_of(batch):
    """{row: tokens}"""
    return {item.sequence.request.row_idx: item.num_tokens for item in batch.items}


def step(engine):
    """One step; the batch as {row: tokens}, and the finished rows."""
    batch, land = launch(engine)
    return tokens_of(batch), land()


def batches_of(engine):
    """The steps of the whole job, one by one."""
    while engine.has_work:
        batch, land = launch(engine)
        land()
        yield batch
