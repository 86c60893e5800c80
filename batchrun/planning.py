"""What is known of a job before it runs: its plan, how long that will take, and what a step of its model costs."""

import json
import os
import shlex
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path

from batchrun.checkpoint import Checkpoint, cache_folder
from batchrun.errors import NotMeasured, StorageFailed, UsageError
from batchrun.job import MEASURED, Job
from batchrun.model_spec import ModelSpec
from batchrun.observe.events import Message, Observe
from batchrun.opened import OpenedJob, find_model, open_job
from batchrun.plan.plan import Plan, load_plan
from batchrun.plan.planner import make_plan
from batchrun.recall import Recall, giving_way
from batchrun.reuse import earlier_job, foresee
from batchrun.stop import StopRequest
from batchrun.store.at_hand import at_hand
from batchrun.store.counts import total
from batchrun.store.durable import storage_errors, write_file
from batchrun.tokenizer import Tokenizer
from batchrun.tune import fleet, simulation
from batchrun.tune import tune as tuning
from batchrun.tune.choice import Weights
from batchrun.tune.fleet import Fleet
from batchrun.tune.imagined import Device
from batchrun.tune.profile import Profile, find, read, this_machine
from batchrun.tune.roofline import DEVICES, roofline

_EXAMPLE_DEVICE = "h100-80gb"


def plan(job: Job, observe: Observe, stop: StopRequest) -> Plan:
    """Plans the job, or finds the plan that it has; loads no weights.

    Raises:
        StoppedEarly, StoppedByUser: `stop` was raised, by a signal, the deadline or `batchrun cancel`.
        BatchrunError: whatever is wrong with inputs, columns, model or output, before anything has run.
    """
    opened = open_job(job)
    opened.check_model()
    opened.check_partitions()
    earlier = earlier_job(job, opened.store, opened.identity, opened.results)
    observe = Recall(job, opened.store.at, stop).heeded_by(giving_way(observe, stop))
    with opened.store.lock(job.wait_lock):
        tokenizer = cache(opened.load_tokenizer)
        take_folder(opened, tokenizer, observe)
        made = planned(opened, tokenizer, observe)
        opened.store.share()
    if earlier is not None:
        num_reused = foresee(earlier, job, made)
        observe(Message("info", f"{num_reused:,} of {made.summary.num_rows:,} rows are answered by {earlier.name}"))
    return made


def how_to_estimate(job: Job) -> str | None:
    """The command after which `estimate` knows; None where none helps."""
    if job.task != "generate" or job.num_beams > 1:
        return None
    return tune_command(job, find_model(job).spec)


def num_done(job: Job) -> int:
    """Rows of the job that have their result already. Raises StorageFailed where a part cannot be read."""
    with at_hand(job.output) as found:
        return total(found.at.list_parts()).rows


def estimate(job: Job, plan: Plan) -> simulation.Estimate | None:
    """What the plan will take to run, by what `tune` measured; None where it has not measured this model here, and
    of tasks that generate nothing, or search with beams.

    Kept beside the plan, for the report to hold against what came. Raises StorageFailed when it cannot be.
    """
    spec = find_model(job).spec
    profile = find(cache_folder(), job, spec)
    if profile is None or job.task != "generate" or job.num_beams > 1:
        return None
    estimated = simulation.estimate(job, plan, profile)
    with storage_errors(plan.folder):
        write_file(plan.folder / "estimate.json", json.dumps(asdict(estimated)).encode(), plan.folder)
    return estimated


def find_device(job: Job, name: str | None) -> Device:
    """What a worker runs on: the device `name`, by its published peaks or by a profile's file, or what was measured of
    the job's model here, with as many threads as this process is to have.

    Raises:
        NotMeasured: the model was not measured here, which the plan does not need.
        UsageError: nothing is known of the device, or nothing that would be of use for the job.
    """
    if job.task != "generate" or job.num_beams > 1:
        what = "--num-beams" if job.num_beams > 1 else f"--task {job.task}"
        raise UsageError(f"--simulate is for generated text, and {what} is timed by nothing yet; leave it out")
    if job.tensor_parallel > 1:
        raise UsageError("--simulate knows no steps of several ranks; leave out --tensor-parallel")
    if job.disaggregate:
        raise UsageError("--simulate knows no steps of a prefiller; leave out --disaggregate")
    checkpoint = find_model(job)
    if name in DEVICES:
        return roofline(name, job, checkpoint)
    if name is not None:
        return _profile_of(Path(name), job, checkpoint.spec)
    profile = find(cache_folder(), job, checkpoint.spec)
    if profile is None:
        remedy = ", or ".join(_ways_to_know(job, checkpoint)) or "nothing measures it yet, leave out --simulate"
        raise NotMeasured(f"--simulate: {checkpoint.spec.name} was not measured here as the job would run it; {remedy}")
    return profile


def tune_command(job: Job, spec: ModelSpec) -> str | None:
    """What measures the job's model as the job would run it here; None where `tune` cannot."""
    if spec.has_states or job.quantization != "none" or job.tensor_parallel > 1:
        return None
    threads = [f"OMP_NUM_THREADS={this_machine().threads}"] if "OMP_NUM_THREADS" in os.environ else []
    command = [*threads, "batchrun", "tune", *([] if job.model is None else [shlex.quote(job.model)])]
    for name in MEASURED:
        value = getattr(job, name)
        if value != Job.model_fields[name].default:
            flag = "--" + name.replace("_", "-")
            command += [flag] if value is True else [flag, shlex.quote(value)]
    return " ".join(command)


def _ways_to_know(job: Job, checkpoint: Checkpoint) -> list[str]:
    """What to do to have the steps of the job's model; only what will work."""
    command = tune_command(job, checkpoint.spec)
    ways = [] if command is None else [f"{command} measures it"]
    with suppress(UsageError):
        roofline(_EXAMPLE_DEVICE, job, checkpoint)
        ways.append(f"name a device: --simulate 8x{_EXAMPLE_DEVICE}")
    return ways


def simulate(job: Job, plan: Plan, device: Device, workers: tuple[int, ...], cost_per_hour: float | None) -> Fleet:
    """What the plan takes so many workers. Raises StorageFailed when it cannot be read."""
    return fleet.simulate(job, plan, device, workers, cost_per_hour)


def _profile_of(path: Path, job: Job, spec: ModelSpec) -> Profile:
    profile = read(path) if path.is_file() else None
    if profile is None:
        raise UsageError(
            f"--simulate: {path} is no device that is known ({', '.join(sorted(DEVICES))}), and no profile that "
            "batchrun tune wrote"
        )
    if profile.digest != spec.digest:
        raise UsageError(f"--simulate: {path} was measured for {profile.model}, not for {spec.name}")
    if not profile.options.include(job):
        raise UsageError(f"--simulate: {path} was measured with other types of numbers, or on another kind of device")
    return profile


def tune(job: Job, weights: Weights, is_quick: bool, observe: Observe) -> tuning.Tuned:
    """Measures the job's model on this machine, for the plans and runs to come.

    Raises:
        BatchrunError: the model or device is not there, or the cache cannot be written to.
    """
    return tuning.tune(job, find_model(job), weights, cache_folder(), is_quick=is_quick, observe=observe)


def take_folder(opened: OpenedJob, tokenizer: Callable[[], Tokenizer], observe: Observe) -> None:
    """Makes the folder this job's.

    Another job that was there goes only once this one's plan is made, so that one that cannot be planned costs nothing.
    """
    if not opened.store.holds_other(opened.identity):
        opened.claim()
        return
    staged = _make_plan(opened, tokenizer, observe)
    opened.claim()
    opened.store.adopt_plan(staged)


def planned(opened: OpenedJob, tokenizer: Callable[[], Tokenizer], observe: Observe) -> Plan:
    """The plan that the job has, or a new one. Raises BatchrunError."""
    at = opened.store.at
    if not at.plan.exists():
        opened.store.adopt_plan(_make_plan(opened, tokenizer, observe))
    plan = load_plan(at.plan)
    if plan is None:
        raise StorageFailed(f"{at.plan} holds no plan; move it away and run the same command again")
    return plan


def _make_plan(opened: OpenedJob, tokenizer: Callable[[], Tokenizer], observe: Observe) -> Path:
    """Where the plan was made: not at its place, which may be another process's by now."""
    folder = opened.store.tmp / opened.store.at.plan.name
    make_plan(opened.job, opened.files, tokenizer(), opened.checkpoint.spec, folder, observe)
    return folder
