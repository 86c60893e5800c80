"""Profiles of devices that take a known time."""

from datetime import UTC, datetime
from pathlib import Path

from batchrun.checkpoint import resolve
from batchrun.engine.step_time import StepTimes
from batchrun.tune.profile import Options, Pool, Profile, Start, this_machine
from tests.tune.devices import TIMES

SPEC = resolve("echo", revision=None, cache=Path("none"), trust_remote_code=False).spec


def make_profile(
    *, digest: str = SPEC.digest, times: StepTimes = TIMES, pool_bytes: int = 64 << 20, num_seqs: int = 31
) -> Profile:
    """Of a CPU, found by jobs that leave device and types to themselves or name what they are."""
    return Profile(
        digest=digest,
        model="echo",
        machine=this_machine(),
        options=Options(
            device=("cpu", "auto"),
            dtype=("float32", "auto"),
            kv_cache_dtype=("float32", "auto"),
            enforce_eager=False,
            quantization="none",
        ),
        measured_at=datetime(2026, 11, 30, 2, 3, tzinfo=UTC),
        device="cpu",
        dtype="float32",
        kv_dtype="float32",
        kernel="none",
        flops_per_s=183e9,
        bytes_per_s=21e9,
        costs=times.by_name,
        num_steps=63,
        median_error=0.021,
        worst_error=0.111,
        pool=Pool(is_gpu=False, pool_bytes=pool_bytes, kv_bytes_per_token=8),
        load_s=4.0,
        start=Start(job_s=1.0, worker_s=6.0),
        alpha=1.0,
        beta=0.0,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=111,
    )
