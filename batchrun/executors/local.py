"""One engine in this process: builds it for the job's model and device, and lets a worker run the plan through it."""

import logging
import time
from contextlib import closing
from dataclasses import dataclass

from batchrun.checkpoint import Checkpoint
from batchrun.engine.echo import EchoRunner
from batchrun.engine.engine import Engine
from batchrun.engine.scheduler import SchedulerConfig
from batchrun.engine.statistics import Counters
from batchrun.engine.step import Runner
from batchrun.errors import UsageError
from batchrun.job import Job
from batchrun.observe.events import Message, Observe, RunBegan
from batchrun.plan.plan import Plan
from batchrun.plan.sharing import decide
from batchrun.stop import StopRequest
from batchrun.store.store import Store
from batchrun.tasks.task import make_task
from batchrun.tokenizer import Tokenizer
from batchrun.worker import Pace, Worker

_log = logging.getLogger(__name__)
_ECHO_POOL_BYTES = 64 << 20
_ECHO_HOST_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """The size of a step, at most."""

    max_num_seqs: int
    max_num_batched_tokens: int


# Where the job names none: enough rows to fill the device's matrix units, and no more.
_CPU_LIMITS = Limits(max_num_seqs=128, max_num_batched_tokens=512)
_GPU_LIMITS = Limits(max_num_seqs=256, max_num_batched_tokens=8192)


@dataclass(frozen=True, slots=True)
class Ran:
    """Whether every row of the plan is committed now, what the engine counted, and how long it ran; seconds.

    `checkpoint_s` of them went into saving, `recording_s` into saying how it goes.
    """

    is_complete: bool
    counters: Counters
    seconds: float
    checkpoint_s: float = 0.0
    recording_s: float = 0.0


def run(
    job: Job,
    plan: Plan,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    store: Store,
    observe: Observe,
    stop: StopRequest,
) -> Ran:
    """Runs the plan's pending rows; loads the weights for it.

    Raises:
        ModelUnavailable: the model cannot be loaded or served exactly, or the device is not there.
        DataError: a row needs more KV than the pool holds.
    """
    _log.info("loading %s", checkpoint.spec.name)
    with closing(build_runner(job, checkpoint)) as runner:
        return _run_on(runner, job, plan, checkpoint, tokenizer, store, observe, stop)


def _run_on(
    runner: Runner,
    job: Job,
    plan: Plan,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    store: Store,
    observe: Observe,
    stop: StopRequest,
) -> Ran:
    spec = checkpoint.spec
    sharing = decide(job.prefix_caching, plan.summary)
    if sharing.reason:
        observe(Message("info", f"prefix caching is off: {sharing.reason}"))
    shares_prefixes = sharing.is_on and not runner.num_state_slots
    config = configure(job, runner, spec.eos_token_ids, shares_prefixes=shares_prefixes)
    engine = Engine(config, runner, tokenizer.decode)
    observe(
        RunBegan(
            model=spec.name,
            pool_tokens=engine.capacity,
            pool_bytes=runner.num_blocks * runner.block_bytes,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            shares_prefixes=shares_prefixes,
            is_gpu=runner.is_gpu,
        )
    )
    task = make_task(job, tokenizer, spec, shares_prefixes=shares_prefixes)
    pace = Pace(job.checkpoint_every, job.drain_timeout, job.step_timeout, job.abort_after)
    worker = Worker(engine, task, store, observe, stop, pace)
    began = time.monotonic()
    is_complete = worker.run(plan)
    seconds = time.monotonic() - began
    return Ran(is_complete, engine.statistics().counters, seconds, worker.checkpoint_s, worker.recording_s)


def usual_limits(*, is_gpu: bool) -> Limits:
    """Of a job that names none."""
    return _GPU_LIMITS if is_gpu else _CPU_LIMITS


def configure(job: Job, runner: Runner, eos_token_ids: tuple[int, ...], *, shares_prefixes: bool) -> SchedulerConfig:
    """How the job is scheduled on this runner."""
    limits = usual_limits(is_gpu=runner.is_gpu)
    return SchedulerConfig(
        num_blocks=runner.num_blocks,
        num_host_slots=runner.num_host_slots,
        block_size=runner.block_size,
        block_bytes=runner.block_bytes,
        max_num_seqs=job.max_num_seqs or limits.max_num_seqs,
        max_num_batched_tokens=job.max_num_batched_tokens or limits.max_num_batched_tokens,
        eos_token_ids=frozenset(eos_token_ids),
        schedule=job.schedule,
        preemption=job.preemption,
        shares_prefixes=shares_prefixes,
        chunk_alignment_tokens=job.chunk_alignment_tokens,
        long_row_tokens=job.long_row_tokens,
        num_free_tokens=runner.num_free_tokens if job.speculation == "auto" else 0,
        num_state_slots=runner.num_state_slots,
    )


def build_runner(job: Job, checkpoint: Checkpoint) -> Runner:
    """Loads the weights and lays out the pool as the job wants them.

    Raises:
        ModelUnavailable: the model cannot be loaded or served exactly, or the device is not there.
        UsageError: the memory given is not there, or holds nothing.
    """
    if checkpoint.folder is None:
        if job.tensor_parallel > 1:
            raise UsageError("-m echo has no weights to divide; leave out --tensor-parallel")
        block_bytes = 8 * job.block_size
        return EchoRunner(
            num_blocks=(job.kv_cache_memory or _ECHO_POOL_BYTES) // block_bytes,
            block_size=job.block_size,
            num_host_slots=(_ECHO_HOST_BYTES if job.swap_space is None else job.swap_space) // block_bytes,
        )
    # Imported here: planning, status and a complete job need no torch.
    from batchrun.engine.runner import TorchRunner
    from batchrun.engine.runner_options import RunnerOptions, choose_device

    limits = usual_limits(is_gpu=choose_device(job.device).type == "cuda")
    options = RunnerOptions(
        dtype=job.dtype,
        device=job.device,
        max_num_batched_tokens=job.max_num_batched_tokens or limits.max_num_batched_tokens,
        max_num_seqs=job.max_num_seqs or limits.max_num_seqs,
        block_size=job.block_size,
        quantization=job.quantization,
        kv_cache_dtype=job.kv_cache_dtype,
        kv_cache_memory=job.kv_cache_memory,
        gpu_memory_utilization=job.gpu_memory_utilization,
        swap_space=job.swap_space,
        enforce_eager=job.enforce_eager,
        deterministic=job.deterministic,
        trust_remote_code=job.trust_remote_code,
        num_ranks=job.tensor_parallel,
        reads=job.task != "generate",
    )
    return TorchRunner.build(checkpoint, options)
