"""Measures a model on a device of this machine and draws the conclusions: rates, step times, limits of a step."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from batchrun.checkpoint import Checkpoint
from batchrun.engine.step import Runner
from batchrun.engine.step_time import StepTimes, fit, relative_errors
from batchrun.errors import ModelUnavailable
from batchrun.executors.local import Limits, build_runner, usual_limits
from batchrun.job import Job
from batchrun.model_spec import ModelSpec
from batchrun.observe.events import Message, Observe
from batchrun.opened import tokenizer_of
from batchrun.tune.choice import Choice, TypicalRow, Weights, candidates, choose
from batchrun.tune.measure import Measured, Meter
from batchrun.tune.profile import Options, Pool, Profile, save, this_machine
from batchrun.tune.shapes import Shape, grid
from batchrun.tune.start import measure_start

# The largest step measured, by whether it is a GPU.
_LARGEST = {False: Limits(max_num_seqs=64, max_num_batched_tokens=1024), True: Limits(256, 8192)}
_BUDGET_S = 75.0
_QUICK_BUDGET_S = 15.0
_LARGE_STEP = 256  # tokens; from here on a step takes as long as it has tokens


@dataclass(frozen=True, slots=True)
class Tuned:
    """A profile and its file, and the choice in it with what it was compared to."""

    profile: Profile
    file: Path
    choice: Choice
    row: TypicalRow


@dataclass(frozen=True, slots=True)
class _Rates:
    flops_per_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A runner, the rates of its device, and the seconds that all that an engine needs took to load."""

    rates: _Rates
    runner: Runner
    seconds: float


@dataclass(frozen=True, slots=True)
class _Facts:
    device: str
    dtype: str
    kv_dtype: str
    kernel: str


def tune(
    job: Job,
    checkpoint: Checkpoint,
    weights: Weights,
    cache: Path,
    *,
    is_quick: bool,
    observe: Observe,
    clock: Callable[[], float] = time.perf_counter,
) -> Tuned:
    """Starts a job and a worker, loads the job's model as they would, measures it, and keeps a profile in the cache.

    Of the job only options of model and engine are read. Takes about a minute and a half, quick a quarter of that,
    beside the loading. The machine should do nothing else.

    Raises:
        ModelUnavailable: the model cannot be loaded or served exactly, keeps states, or the device is not there.
        UsageError: the memory that is asked for is not there.
        EngineFailed: a process to be timed ended before its time.
        StorageFailed: the cache cannot be written to.
    """
    if checkpoint.spec.has_states:
        raise ModelUnavailable(f"{checkpoint.spec.name} keeps states, and steps of such models are not measured yet")
    # Before this process holds the memory that a worker needs.
    start = measure_start(job, checkpoint, cache, clock)
    spec, loaded = checkpoint.spec, _load(job, checkpoint, clock)
    runner = loaded.runner
    meter = Meter(runner, spec.vocab_size, clock, observe)
    measured = meter.measure(_shapes(runner, spec), budget_s=_QUICK_BUDGET_S if is_quick else _BUDGET_S)
    _warn_of_gaps(measured, observe)
    sizes, seconds = [one.size for one in measured], [one.seconds for one in measured]
    times = fit(sizes, seconds)
    errors = relative_errors(times, sizes, seconds)
    row = TypicalRow()
    choice = _choose(times, measured, weights, row, usual_limits(is_gpu=runner.is_gpu))
    facts = _facts(runner)
    profile = Profile(
        digest=spec.digest,
        model=spec.name,
        machine=this_machine(),
        options=_options(job, facts),
        measured_at=datetime.now(UTC),
        **asdict(facts),
        **asdict(loaded.rates),
        costs=times.by_name,
        num_steps=len(measured),
        median_error=float(np.median(errors)),
        worst_error=float(errors.max()),
        pool=_pool(runner),
        load_s=loaded.seconds,
        start=start,
        **asdict(weights),
        **asdict(choice.best.limits),
    )
    return Tuned(profile, save(cache, profile), choice, row)


def _load(job: Job, checkpoint: Checkpoint, clock: Callable[[], float]) -> _Loaded:
    began = clock()
    import batchrun.engine.runner  # noqa: F401  (loads torch, which is a part of the time a job needs to start)

    import_s = clock() - began
    rates = _measure_rates(job)
    began = clock()
    tokenizer_of(job, checkpoint)
    runner = build_runner(job, checkpoint)
    return _Loaded(rates, runner, import_s + clock() - began)


def _shapes(runner: Runner, spec: ModelSpec) -> list[Shape]:
    largest = _LARGEST[runner.is_gpu]
    # A row of the model's whole length has no room for a token.
    max_len = spec.max_model_len - 1
    return grid(max_rows=largest.max_num_seqs, max_tokens=largest.max_num_batched_tokens, max_len=max_len)


def _warn_of_gaps(measured: Sequence[Measured], observe: Observe) -> None:
    """What a token costs in a large step cannot be told from small ones, in which it waits for the weights."""
    largest = max(one.size.num_tokens for one in measured)
    if largest < _LARGE_STEP:
        text = f"only steps of up to {largest:.0f} tokens could be measured in time: estimates of others are too high"
        observe(Message("warning", f"{text}; tune again without --quick, on an idle machine"))


def _choose(times: StepTimes, measured: Sequence[Measured], weights: Weights, row: TypicalRow, usual: Limits) -> Choice:
    """Among limits that were measured; a slow model's largest steps may not have been."""
    max_rows = int(max(one.size.num_sampled for one in measured))
    max_tokens = int(max(one.size.num_tokens for one in measured))
    return choose(times, weights, row, usual, candidates(max_rows=max_rows, max_tokens=max_tokens))


def _measure_rates(job: Job) -> _Rates:
    """Before the pool is laid out, which leaves a GPU no memory to measure in."""
    from batchrun.engine.runner_options import choose_device
    from batchrun_kernels import native
    from batchrun_kernels.bench.ceiling import measure_cpu, measure_torch

    device = choose_device(job.device)
    if device.type == "cuda":
        from batchrun_kernels.triton.bench.peak import reached

        peak = reached(device)
        return _Rates(peak.flops_per_s, peak.bytes_per_s)
    ceiling = measure_cpu() if native.find() is not None else measure_torch()
    return _Rates(ceiling.flops_per_s, ceiling.bytes_per_s)


def _facts(runner: Runner) -> _Facts:
    from batchrun.engine.runner import TorchRunner

    if not isinstance(runner, TorchRunner):
        return _Facts("cpu", "float32", "float32", "none")
    found = runner.facts
    return _Facts(found.device, found.dtype, found.kv_dtype, found.kernel)


def _options(job: Job, facts: _Facts) -> Options:
    """What else a job may say and mean the same: "auto", or by name what "auto" was here."""
    from batchrun.engine.runner_options import choose_device, choose_dtype

    device = choose_device(job.device)
    is_auto_device = choose_device("auto").type == device.type
    is_auto_dtype = str(choose_dtype("auto", device)).removeprefix("torch.") == facts.dtype
    is_auto_kv = facts.kv_dtype == facts.dtype
    return Options(
        device=_with_auto(device.type, is_auto_device),
        dtype=_with_auto(facts.dtype, is_auto_dtype),
        kv_cache_dtype=_with_auto(facts.kv_dtype, is_auto_kv),
        enforce_eager=job.enforce_eager,
        quantization=job.quantization,
    )


def _with_auto(name: str, is_auto: bool) -> tuple[str, ...]:
    return (name, "auto") if is_auto else (name,)


def _pool(runner: Runner) -> Pool:
    return Pool(
        is_gpu=runner.is_gpu,
        pool_bytes=runner.num_blocks * runner.block_bytes,
        kv_bytes_per_token=runner.block_bytes // runner.block_size,
    )
