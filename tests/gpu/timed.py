"""Each kernel at an 8B Llama's shapes: first whether it is right, then how long it takes beside its floor."""

import gc
from collections.abc import Callable, Iterator

import torch

from batchrun_kernels.triton.bench.attention import attention_workloads, cut_workloads
from batchrun_kernels.triton.bench.layers import layer_workloads
from batchrun_kernels.triton.bench.peak import Peak
from batchrun_kernels.triton.bench.timer import time_s
from batchrun_kernels.triton.bench.workload import FULL, LLAMA_8B, SMALL, TINY, Load, Size, Workload
from tests.gpu.device import assumed, peak_of
from tests.gpu.part import Machine, Part, Result, attempt

Workloads = Callable[[Size, Load], Iterator[Workload]]


def _plan(workloads: Workloads) -> Iterator[str]:
    peak = assumed()
    for workload in workloads(LLAMA_8B, FULL):
        moved, computed = f"{workload.num_bytes / 1e6:,.1f} MB", f"{workload.flops / 1e9:,.1f} GFLOP"
        floor_s = peak.floor_s(workload.num_bytes, workload.flops)
        yield f"{workload.kernel}, {workload.shape}: {moved}, {computed}, floor {floor_s * 1e6:,.1f} us"


def _run(part: str, workloads: Workloads, machine: Machine) -> Iterator[Result]:
    peak = peak_of(machine.device) if machine.is_gpu else None
    size, load = (LLAMA_8B, FULL) if machine.is_gpu else (TINY, SMALL)
    for workload in workloads(size, load):
        yield attempt(part, workload.kernel, lambda one=workload: _try(part, one, machine.device, peak))  # type: ignore[misc]
        gc.collect()
        if machine.is_gpu:
            torch.cuda.empty_cache()


def _try(part: str, workload: Workload, device: torch.device, peak: Peak | None) -> Result:
    """A kernel that is wrong is not timed."""
    trial = workload.prepare(device)
    checked = trial.check()
    words = f"{workload.shape}; error {checked.error:.1e} of {checked.allowed:.1e} allowed"
    if peak is None or not checked.is_right:
        return Result(part, workload.kernel, checked.is_right, words)
    took_s, floor_s = time_s(trial.run, device), peak.floor_s(workload.num_bytes, workload.flops)
    numbers = {
        "s": took_s,
        "floor_s": floor_s,
        "bytes": float(workload.num_bytes),
        "flops": float(workload.flops),
        "bytes_per_s": workload.num_bytes / took_s,
        "flops_per_s": workload.flops / took_s,
    }
    words += f"; {took_s * 1e6:,.1f} us, {took_s / floor_s:.2f}x its floor"
    return Result(part, workload.kernel, True, words, numbers)


LAYERS = Part(
    "layers",
    "every kernel beside attention: right, and how far from its floor",
    60,
    lambda: _plan(layer_workloads),
    lambda machine: _run("layers", layer_workloads, machine),
)
ATTENTION = Part(
    "attention",
    "decode, chunks, shared prefixes: right, and how far from the floor",
    90,
    lambda: _plan(attention_workloads),
    lambda machine: _run("attention", attention_workloads, machine),
)
CUTS = Part(
    "cuts",
    "attention in other tiles and pieces than the table's",
    100,
    lambda: _plan(cut_workloads),
    lambda machine: _run("cuts", cut_workloads, machine),
)
