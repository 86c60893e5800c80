"""What a model's steps would take on a device that is not here, by its published peaks: a roofline.

A step takes as long as reading the weights, as computing its tokens, or as the host needs for it, whichever is longest;
attention comes on top. What a model weighs is read from its files, without loading them.
"""

import json
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING

from batchrun.engine.step_time import TERMS, TOKEN_KNEES, StepTimes
from batchrun.errors import UsageError
from batchrun.executors.local import usual_limits
from batchrun.tune.profile import Pool

if TYPE_CHECKING:
    from pathlib import Path

    from batchrun.checkpoint import Checkpoint
    from batchrun.job import Job

# What programs reach of the published peaks.
COMPUTED_SHARE, READ_SHARE = 0.5, 0.8
# What a host needs for a step of a full batch, while the device computes the one before.
HOST_S = 0.005
_LARGEST_STEP = 8192  # tokens
_ELEMENT_BYTES = 2
_ACTIVATIONS_BYTES = 2 << 30
_MIXTURES = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True, slots=True)
class Peaks:
    """As the vendor has them: dense 16-bit arithmetic, and the memory."""

    flops_per_s: float
    bytes_per_s: float
    memory_bytes: float


DEVICES = {
    "a100-80gb": Peaks(312e12, 2.039e12, 80e9),
    "h100-80gb": Peaks(989e12, 3.35e12, 80e9),
    "h200-141gb": Peaks(989e12, 4.8e12, 141e9),
    "l4": Peaks(121e12, 300e9, 24e9),
    "l40s": Peaks(362e12, 864e9, 48e9),
    "t4": Peaks(65e12, 320e9, 16e9),
}


@dataclass(frozen=True, slots=True)
class Roofline:
    """Implements `Device`. How long a job takes to start there is not known, and counts as nothing."""

    label: str
    times: StepTimes
    bytes_per_s: float
    pool: Pool
    max_num_seqs: int
    max_num_batched_tokens: int

    def start_s(self, num_workers: int) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class _Weights:
    """Numbers in the model's files: in tables with a row for each token, and in all other layers."""

    tables: int
    layers: int


def roofline(name: str, job: "Job", checkpoint: "Checkpoint") -> Roofline:
    """The job's model on one of `DEVICES`, in 16 bits. Raises UsageError for what this says nothing about."""
    peaks, spec, folder = DEVICES[name], checkpoint.spec, checkpoint.folder
    if folder is None:
        raise UsageError(f"{spec.name} has no weights, so it runs on no {name}; leave the device out")
    _check(name, job, folder, has_states=spec.has_states)
    weights = _weigh(folder, spec.vocab_size)
    head = spec.vocab_size * spec.hidden_size
    flops_per_s, bytes_per_s = COMPUTED_SHARE * peaks.flops_per_s, READ_SHARE * peaks.bytes_per_s
    kv_bytes = spec.kv_bytes_per_token(_ELEMENT_BYTES)
    room = job.gpu_memory_utilization * peaks.memory_bytes - _ACTIVATIONS_BYTES
    pool_bytes = int(room) - _ELEMENT_BYTES * (weights.layers + weights.tables)
    if pool_bytes < kv_bytes * job.block_size:
        raise UsageError(f"{spec.name} does not fit the memory of {name}; name a larger device with --simulate")
    floor_s = max(HOST_S, _ELEMENT_BYTES * (weights.layers + head) / bytes_per_s)
    costs = dict.fromkeys(TERMS, 0.0) | _above(floor_s, 2 * weights.layers / flops_per_s)
    # A pair's two products, in as many heads as make up the hidden state.
    costs |= {"kv_token": kv_bytes / bytes_per_s, "pair": 4 * spec.hidden_size * spec.kv_layers / flops_per_s}
    costs["sampled"] = 2 * head / flops_per_s
    limits = usual_limits(is_gpu=True)
    return Roofline(
        label=f"as {name} by its published peaks: {COMPUTED_SHARE:.0%} of {peaks.flops_per_s / 1e12:.0f} TFLOP/s and "
        f"{READ_SHARE:.0%} of {peaks.bytes_per_s / 1e9:,.0f} GB/s, {HOST_S * 1000:g} ms a step at least",
        times=StepTimes.named(costs),
        bytes_per_s=bytes_per_s,
        pool=Pool(is_gpu=True, pool_bytes=pool_bytes, kv_bytes_per_token=kv_bytes),
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
    )


def _check(name: str, job: "Job", folder: "Path", *, has_states: bool) -> None:
    """Raises UsageError for jobs whose steps take something else."""
    config = json.loads((folder / "config.json").read_bytes())
    config = {**config, **config.get("text_config", {})}
    # These `tune` does not measure either.
    if has_states:
        raise UsageError(
            f"what {name} needs for a step is not known, since the model keeps states; leave out --simulate"
        )
    if job.quantization != "none":
        raise UsageError(f"--quantization {job.quantization} is for a CPU, so the job runs on no {name}; leave it out")
    reasons = {
        "the model is a mixture of experts": any(config.get(key) for key in _MIXTURES),
        f"--dtype {job.dtype} is not of 16 bits": job.dtype == "float32",
        f"--kv-cache-dtype {job.kv_cache_dtype} is not of 16 bits": job.kv_cache_dtype == "float32",
    }
    for reason in (reason for reason, is_so in reasons.items() if is_so):
        raise UsageError(f"what {name} needs for a step is not known, since {reason}; batchrun tune measures it there")


def _weigh(folder: "Path", vocab_size: int) -> _Weights:
    from safetensors import safe_open

    tables = layers = 0
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="np") as file:
            for shape in (file.get_slice(key).get_shape() for key in file.keys()):  # noqa: SIM118  (no mapping)
                if shape[:1] == [vocab_size]:
                    tables += prod(shape)
                else:
                    layers += prod(shape)
    return _Weights(tables, layers)


def _above(floor_s: float, token_s: float) -> dict[str, float]:
    """Costs of so much a token, or the floor where that is more: exact at the knees."""
    knees = (0, *TOKEN_KNEES, _LARGEST_STEP)
    values = [max(floor_s, token_s * knee) for knee in knees]
    slopes = [
        (end - begin) / (after - at)
        for (at, after), (begin, end) in zip(pairwise(knees), pairwise(values), strict=True)
    ]
    bends = {f"token_over_{knee}": after - at for knee, (at, after) in zip(TOKEN_KNEES, pairwise(slopes), strict=True)}
    return {"step": floor_s, "token": slopes[0]} | bends
