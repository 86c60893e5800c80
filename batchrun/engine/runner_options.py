"""How a runner is to be laid out, and the device and types that this means on this machine."""

from dataclasses import dataclass
from typing import Literal

import torch

from batchrun.errors import ModelUnavailable, UsageError
from batchrun_kernels.layers import Quantization

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
KVDTypeName = Literal["auto", "float16", "float32"]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """How a runner is laid out; sizes in bytes, None: chosen from the memory there is.

    Rows are read where it `reads`, and continued otherwise. A step will have at most `max_num_batched_tokens` tokens of
    `max_num_seqs` rows; a GPU keeps room for such a one. Of a model with states so many rows have one, as far as these
    take half of `kv_cache_memory` at most. The model is divided among `num_ranks` processes, each of which has as much
    memory for keys and values. Where that is chosen, `num_sharing` such runners divide the host's memory. Swap
    space is in the memory of the `swap_descriptor`, if there is one, which another process has as well.
    """

    dtype: DTypeName = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    block_size: int = 16
    quantization: Quantization = "none"
    kv_cache_dtype: KVDTypeName = "auto"
    kv_cache_memory: int | None = None
    gpu_memory_utilization: float = 0.9
    swap_space: int | None = None
    enforce_eager: bool = False
    deterministic: bool = False
    trust_remote_code: bool = False
    reads: bool = False
    num_ranks: int = 1
    num_sharing: int = 1
    swap_descriptor: int | None = None


def choose_device(name: str) -> torch.device:
    """The device meant by "auto", "cpu" or "cuda"; raises ModelUnavailable when there is no such one."""
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise ModelUnavailable("no usable CUDA device; use --device cpu, or install a CUDA build of torch")
    return torch.device("cuda" if has_gpu and name != "cpu" else "cpu")


def use_gpu(index: int) -> None:
    """Has this process compute on one of the GPUs that it sees. Raises UsageError when there are not so many."""
    num = torch.cuda.device_count()
    if index >= num:
        remedy = "lower --workers, or leave out --disaggregate"
        raise UsageError(f"{index + 1} engines or more need as many GPUs, but there are {num}; {remedy}")
    torch.cuda.set_device(index)


def choose_dtype(name: DTypeName, device: torch.device) -> torch.dtype:
    """The dtype of weights, keys and values.

    Auto is float32 on a CPU, where the others are emulated; bfloat16 on a GPU that has it, float16 on an older one.
    """
    if name != "auto":
        return _DTYPES[name]
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16


def choose_kv_dtype(name: KVDTypeName, dtype: torch.dtype) -> torch.dtype:
    """The dtype of keys and values of a model of `dtype`."""
    return _DTYPES.get(name, dtype)
