"""What scheduling costs a step, however many rows wait: the scheduler alone, with as many as run at once; and what
keeping prefixes costs rows that share none.

python -m tests.endurance.step_cost --waiting 1000 --waiting 1000000
"""

import time
from statistics import median

import click
import numpy as np

from batchrun.engine.request import Request, SamplingParams
from batchrun.engine.scheduler import Scheduler, SchedulerConfig
from batchrun.engine.step import Sampled

_BLOCK_SIZE, _PROMPT_LEN, _OUTPUT_LEN = 16, 48, 64  # tokens
_SAMPLING = SamplingParams(max_tokens=_OUTPUT_LEN, ignore_eos=True)
_UNSHARED_LEN, _ROUNDS = 300, 5


def filled(num_running: int, num_waiting: int) -> Scheduler:
    """A scheduler with this many rows to come, two thirds of whose prompts are shared with the row before."""
    blocks = num_running * (_PROMPT_LEN + _OUTPUT_LEN + _BLOCK_SIZE) // _BLOCK_SIZE
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=blocks, num_host_slots=0, block_size=_BLOCK_SIZE, block_bytes=_BLOCK_SIZE,
            max_num_seqs=num_running, max_num_batched_tokens=512, eos_token_ids=frozenset(),
        )
    )  # fmt: skip
    shared = np.arange(_PROMPT_LEN, dtype=np.int32)
    for row in range(num_waiting):
        prompt = shared.copy()
        prompt[-_BLOCK_SIZE:] = row + np.arange(_BLOCK_SIZE)
        scheduler.add(Request(row, prompt, _SAMPLING))
    return scheduler


def seconds_a_step(scheduler: Scheduler, num_steps: int) -> list[float]:
    """Of `schedule` and `update` together, once the batch is full; steps in which rows end and enter are among them."""
    lasted = []
    for number in range(_OUTPUT_LEN + num_steps):
        began = time.perf_counter()
        batch = scheduler.schedule()
        sampled = Sampled(np.full(len(batch.sampled), 7, dtype=np.int32))
        scheduler.update(batch, sampled, find_stop=lambda sequence: None)
        if number >= _OUTPUT_LEN:
            lasted.append(time.perf_counter() - began)
    return lasted


def seconds_for_unshared(num_running: int, *, shares_prefixes: bool) -> float:
    """Of scheduling four times as many prompts as run at a time, which share nothing, for one token of each."""
    blocks = num_running * (_UNSHARED_LEN // _BLOCK_SIZE + 2)
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=blocks, num_host_slots=0, block_size=_BLOCK_SIZE, block_bytes=_BLOCK_SIZE,
            max_num_seqs=num_running, max_num_batched_tokens=512, eos_token_ids=frozenset(),
            shares_prefixes=shares_prefixes,
        )
    )  # fmt: skip
    prompts = np.random.default_rng(0).integers(0, 2**31, (4 * num_running, _UNSHARED_LEN), dtype=np.int32)
    for row, prompt in enumerate(sorted(prompts, key=lambda prompt: int(prompt[0]))):
        scheduler.add(Request(row, prompt, SamplingParams(max_tokens=1, ignore_eos=True)))
    began = time.perf_counter()
    while scheduler.has_work:
        batch = scheduler.schedule()
        sampled = Sampled(np.full(len(batch.sampled), 7, dtype=np.int32))
        scheduler.update(batch, sampled, find_stop=lambda sequence: None)
    return time.perf_counter() - began


def upkeep_seconds(num_running: int) -> float:
    """What keeping prefixes takes for a prompt token; the least of several rounds, with and without by turns."""
    rounds = [[seconds_for_unshared(num_running, shares_prefixes=on) for on in (True, False)] for _ in range(_ROUNDS)]
    with_tree, without = (min(lasted) for lasted in zip(*rounds, strict=True))
    return (with_tree - without) / (4 * num_running * _UNSHARED_LEN)


@click.command()
@click.option("--waiting", multiple=True, type=int, default=(1_000, 1_000_000), show_default=True)
@click.option("--running", default=64, show_default=True)
@click.option("--steps", default=500, show_default=True)
def main(waiting: tuple[int, ...], running: int, steps: int) -> None:
    """Print a line for each number of waiting rows, and one for the tree's upkeep."""
    for num_waiting in waiting:
        lasted = sorted(seconds_a_step(filled(running, num_waiting), steps))
        mean = sum(lasted) / len(lasted)
        click.echo(
            f"{num_waiting:9,} waiting, {running} running: a step {mean * 1e3:.2f} ms on average, "
            f"median {median(lasted) * 1e3:.2f}, 99th percentile {lasted[len(lasted) * 99 // 100] * 1e3:.2f}"
        )
    click.echo(f"keeping prefixes that nobody shares: {upkeep_seconds(running) * 1e6:.2f} microseconds a prompt token")


if __name__ == "__main__":
    main()
