"""What was measured of a model on a device, kept in the user's cache for the jobs to come.

Owns the files and decides which of them is of a job's model, options and machine, which it does without torch.
"""

import hashlib
import importlib.util
import logging
import os
import platform
import secrets
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, PositiveFloat, PositiveInt, ValidationError

from batchrun.cores import num_threads
from batchrun.digest import sampled_digest
from batchrun.engine.step_time import StepTimes
from batchrun.errors import StorageFailed

if TYPE_CHECKING:
    from batchrun.job import Job
    from batchrun.model_spec import ModelSpec
    from batchrun.tune.imagined import Device

_CPU_FACTS = Path("/proc/cpuinfo")
_log = logging.getLogger(__name__)


class _Facts(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Machine(_Facts):
    """What the same steps would take another time on: the processor, how many threads are asked for, the C kernels."""

    processor: str
    threads: int
    kernels: str


class Options(_Facts):
    """The values of a job's options that mean the device and the types that were measured; "auto" is among them where
    it means the same here."""

    device: tuple[str, ...]
    dtype: tuple[str, ...]
    kv_cache_dtype: tuple[str, ...]
    enforce_eager: bool
    quantization: str

    def include(self, job: "Job") -> bool:
        return (
            job.device in self.device
            and job.dtype in self.dtype
            and job.kv_cache_dtype in self.kv_cache_dtype
            and job.enforce_eager == self.enforce_eager
            and job.quantization == self.quantization
            and job.tensor_parallel == 1
        )


class Pool(_Facts):
    """What the runner had of blocks, where the job did not say; bytes."""

    is_gpu: bool
    pool_bytes: int
    kv_bytes_per_token: PositiveInt


class Start(_Facts):
    """What a job takes beside its engines, in seconds, its plan being there.

    `job_s` is all of it but what loads a model: from the command to its first row, and from the last one to the result.
    `worker_s` is a worker's, from the start of its process to its first step.
    """

    job_s: NonNegativeFloat
    worker_s: NonNegativeFloat


class Profile(_Facts):
    """Rates, step times and the choice made from them. Times are in seconds.

    `flops_per_s` and `bytes_per_s` are the device's peaks: F and B. `median_error` and `worst_error` say how far the
    step times are off for the steps that they were learned from, as a share of 1. `load_s` is the time that a
    running process takes to load all that its engine needs. `start` is None in profiles from before it was measured.
    """

    format: Literal[1] = 1
    digest: str
    model: str
    machine: Machine
    options: Options
    measured_at: datetime
    device: str
    dtype: str
    kv_dtype: str
    kernel: str
    flops_per_s: PositiveFloat
    bytes_per_s: PositiveFloat
    costs: dict[str, NonNegativeFloat]
    num_steps: int
    median_error: float
    worst_error: float
    pool: Pool
    load_s: float
    start: Start | None = None
    alpha: float
    beta: float
    max_num_seqs: PositiveInt
    max_num_batched_tokens: PositiveInt

    @property
    def times(self) -> StepTimes:
        return StepTimes.named(self.costs)

    @property
    def label(self) -> str:
        untimed = "" if self.start else ", but not what starts a job: tune again"
        return f"{self.measured_at:%Y-%m-%d} on {self.device}, {self.dtype}{untimed}"

    def start_s(self, num_workers: int) -> float:
        """What a job of so many workers takes beside its engines; of an old profile only the loading."""
        if self.start is None:
            return self.load_s
        # One engine is in the job's own process, several are in workers.
        return self.start.job_s + (self.load_s if num_workers == 1 else self.start.worker_s)


def this_machine() -> Machine:
    """Without importing torch, which takes its number of threads from the same places."""
    return Machine(processor=_processor(), threads=num_threads(), kernels=_kernels())


def find(cache: Path, job: "Job", spec: "ModelSpec") -> Profile | None:
    """The newest profile of this model on this machine that the job's options mean.

    A file that cannot be read is passed over with a warning.
    """
    here = this_machine()
    found = [read(path) for path in sorted(_folder(cache).glob(f"{spec.digest[:16]}-*.json"))]
    fitting = [
        profile
        for profile in found
        if profile is not None
        and (profile.digest, profile.machine) == (spec.digest, here)
        and profile.options.include(job)
    ]
    return max(fitting, key=lambda profile: profile.measured_at, default=None)


def read(path: Path) -> Profile | None:
    """The profile in a file; None, with a warning, for one that cannot be used."""
    try:
        profile = Profile.model_validate_json(path.read_bytes())
        StepTimes.named(profile.costs)
    except (OSError, ValueError) as error:
        reason = f"{error.error_count()} fields are wrong" if isinstance(error, ValidationError) else error
        _log.warning("%s is not used: %s; batchrun tune writes it anew", path, reason)
        return None
    return profile


def save(cache: Path, profile: Profile) -> Path:
    """Keeps the profile in the place of an earlier one of the same model, machine and options; its file.

    Raises StorageFailed when the cache cannot be written to.
    """
    key = profile.machine.model_dump_json() + profile.options.model_dump_json()
    name = f"{profile.digest[:16]}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    path = _folder(cache) / name
    unfinished = path.with_name(f".{secrets.token_hex(6)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(profile.model_dump_json(indent=1), encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        raise StorageFailed(f"cannot write {path}: {os.strerror(error.errno or 0)}") from error
    finally:
        with suppress(OSError):
            unfinished.unlink()
    return path


def as_tuned(job: "Job", device: "Device | None") -> "Job":
    """The job with the device's limits of a step, where it names neither and leaves the schedule as it is.

    No answer depends on them.
    """
    is_open = job.max_num_seqs is None and job.max_num_batched_tokens is None and job.schedule == "chunked"
    if device is None or not is_open:
        return job
    return job.model_copy(
        update={
            "max_num_seqs": max(device.max_num_seqs, job.num_beams),
            "max_num_batched_tokens": device.max_num_batched_tokens,
        }
    )


def _folder(cache: Path) -> Path:
    return cache / "profiles"


def _processor() -> str:
    try:
        lines = _CPU_FACTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _kernels() -> str:
    """A digest of the C library, or nothing where it was not built."""
    package = importlib.util.find_spec("batchrun_kernels")
    folders = (package.submodule_search_locations or ()) if package else ()
    files = [file for folder in folders for file in Path(folder).glob("_native.*")]
    return sampled_digest(files)[:16] if files else ""
