"""One engine in this process: builds it for the job's model and device, and lets a worker run the plan through it."""

import logging
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass

from batchrun.checkpoint import Checkpoint
from batchrun.engine.disaggregated import DisaggregatedEngine
from batchrun.engine.echo import EchoRunner
from batchrun.engine.engine import Engine
from batchrun.engine.scheduler import SchedulerConfig
from batchrun.engine.statistics import Counters
from batchrun.engine.step import Runner
from batchrun.errors import DataError, ModelUnavailable, UsageError
from batchrun.executors.prefill_process import PrefillProcess
from batchrun.imports import import_for_models
from batchrun.job import Job
from batchrun.ledger import Ledger
from batchrun.model_spec import ModelSpec
from batchrun.observe.events import Message, Observe, RunBegan
from batchrun.pending import PendingRows
from batchrun.plan.plan import Plan, PlanSummary
from batchrun.plan.sharing import decide
from batchrun.stop import StopRequest
from batchrun.store.store import Store
from batchrun.tally import Tally
from batchrun.tasks.task import make_task
from batchrun.tokenizer import Tokenizer
from batchrun.worker import Pace, Worker

_log = logging.getLogger(__name__)
_ECHO_POOL_BYTES = 64 << 20
_ECHO_HOST_BYTES = 16 << 20
# Room for prompts that are computed ahead of the rows that run.
_HANDED_OVER_BYTES = 1 << 30


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


@dataclass(frozen=True, slots=True)
class Place:
    """Where an engine is among those of the same machine: on which of its GPUs, and with how many it shares memory.

    With a `swap_descriptor` its swap space is in that memory.
    """

    device_index: int = 0
    num_sharing: int = 1
    swap_descriptor: int | None = None


@dataclass(frozen=True, slots=True)
class Loaded:
    """An engine on its runner, and under which limits it runs."""

    engine: Engine
    runner: Runner
    began: RunBegan
    prefill: PrefillProcess | None = None

    def close(self) -> None:
        """Ends what was started for the engine."""
        self.runner.close()
        if self.prefill is not None:
            self.prefill.close()


ONLY_PLACE = Place()


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
    with closing(load(job, checkpoint, tokenizer, plan.summary)) as loaded:
        sharing = decide(job.prefix_caching, plan.summary)
        if sharing.reason:
            observe(Message("info", f"prefix caching is off: {sharing.reason}"))
        engine = loaded.engine
        task = make_task(job, tokenizer, checkpoint.spec, shares_prefixes=loaded.began.shares_prefixes)
        tally = Tally(job, plan.summary, store.counts(), job.abort_after)
        ledger = Ledger(store, observe, tally)
        ledger.begin(loaded.began)
        worker = Worker(
            engine, task, ledger, tally, stop, Pace(job.checkpoint_every, job.drain_timeout, job.step_timeout)
        )
        began = time.monotonic()
        is_complete = worker.run(PendingRows(plan, store))
        seconds = time.monotonic() - began
        return Ran(is_complete, engine.statistics().counters, seconds, worker.checkpoint_s, ledger.recording_s)


def load(
    job: Job, checkpoint: Checkpoint, tokenizer: Tokenizer, plan: PlanSummary, place: Place = ONLY_PLACE
) -> Loaded:
    """The job's engine, ready for the rows of its plan; to be closed. Raises as `run`."""
    if job.disaggregate:
        return _load_two(job, checkpoint, tokenizer, plan)
    runner = build_runner(job, checkpoint, place)
    try:
        return _engine_on(runner, job, checkpoint.spec, tokenizer, plan)
    except BaseException:
        runner.close()
        raise


def _load_two(job: Job, checkpoint: Checkpoint, tokenizer: Tokenizer, plan: PlanSummary) -> Loaded:
    """The job's engine, and another one in a process of its own that computes prompts for it."""
    if job.swap_space is None:
        usual = _ECHO_HOST_BYTES if checkpoint.folder is None else _HANDED_OVER_BYTES
        job = job.model_copy(update={"swap_space": usual})
    shares_prefixes = decide(job.prefix_caching, plan).is_on
    with ExitStack() as begun:
        prefill = PrefillProcess(job, checkpoint, shares_prefixes=shares_prefixes)
        begun.callback(prefill.close)
        runner = build_runner(job, checkpoint, Place(num_sharing=2, swap_descriptor=prefill.swap_descriptor))
        begun.callback(runner.close)
        if not runner.num_host_slots:
            raise UsageError(f"--swap-space holds no block of {runner.block_bytes} bytes to hand over; raise it")
        prefill.wait_until_ready(runner.block_format)
        loaded = _engine_on(runner, job, checkpoint.spec, tokenizer, plan, prefill)
        begun.pop_all()
        return loaded


def _engine_on(
    runner: Runner,
    job: Job,
    spec: ModelSpec,
    tokenizer: Tokenizer,
    plan: PlanSummary,
    prefill: PrefillProcess | None = None,
) -> Loaded:
    if bool(runner.num_state_slots) != spec.has_states:
        raise ModelUnavailable(f"{spec.name} keeps states where its config.json says nothing of them, or the reverse")
    shares_prefixes = decide(job.prefix_caching, plan).is_on
    config = configure(job, runner, spec.eos_token_ids, shares_prefixes=shares_prefixes)
    if prefill is None:
        engine = Engine(config, runner, tokenizer.decode)
    else:
        engine = DisaggregatedEngine(config, runner, tokenizer.decode, prefill)
    if plan.longest_len > engine.capacity:
        raise DataError(
            f"the longest row needs KV for {plan.longest_len:,} tokens, prompt and output, but the pool holds "
            f"{engine.capacity:,}; raise --kv-cache-memory, or lower --max-tokens or --max-model-len"
        )
    began = RunBegan(
        model=spec.name,
        pool_tokens=engine.capacity,
        pool_bytes=runner.num_blocks * runner.block_bytes,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        shares_prefixes=shares_prefixes,
        is_gpu=runner.is_gpu,
    )
    return Loaded(engine, runner, began, prefill)


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


def build_runner(job: Job, checkpoint: Checkpoint, place: Place = ONLY_PLACE) -> Runner:
    """Loads the weights and lays out the pool as the job wants them.

    Raises:
        ModelUnavailable: the model cannot be loaded or served exactly, or the device is not there.
        UsageError: the memory given is not there, or holds nothing; or there are fewer GPUs than workers.
    """
    if checkpoint.folder is None:
        if job.tensor_parallel > 1:
            raise UsageError("-m echo has no weights to divide; leave out --tensor-parallel")
        block_bytes = 8 * job.block_size
        return EchoRunner(
            num_blocks=(job.kv_cache_memory or _ECHO_POOL_BYTES) // block_bytes,
            block_size=job.block_size,
            num_host_slots=(_ECHO_HOST_BYTES if job.swap_space is None else job.swap_space) // block_bytes,
            swap_descriptor=place.swap_descriptor,
        )
    # Imported here: planning, status and a complete job need no torch.
    import_for_models()
    from batchrun.engine.runner import TorchRunner
    from batchrun.engine.runner_options import RunnerOptions, choose_device, use_gpu

    is_gpu = choose_device(job.device).type == "cuda"
    if is_gpu:
        use_gpu(place.device_index)
    limits = usual_limits(is_gpu=is_gpu)
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
        num_sharing=place.num_sharing,
        swap_descriptor=place.swap_descriptor,
    )
    return TorchRunner.build(checkpoint, options)
