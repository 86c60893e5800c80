"""How much memory the block pool may take when nobody says, and what the process can give back before."""

import ctypes
import platform
from pathlib import Path

import psutil
import torch

_CPU_SHARE = 0.4
_CPU_AT_MOST = 8 << 30
# Left to the allocator's fragments, and to what recorded steps keep for themselves.
_GPU_SLACK_SHARE = 0.02
_CGROUP = Path("/sys/fs/cgroup")


def gpu_pool_bytes(device: torch.device, *, gpu_memory_utilization: float, workspace_bytes: int) -> int:
    """Bytes for keys and values beside everything in use on the device and a step's workspace."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    share = gpu_memory_utilization - _GPU_SLACK_SHARE
    return max(0, int(total * share) - (total - free) - workspace_bytes)


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory was asked for that is not there: torch has no class of its own for it on a CPU."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def cpu_pool_bytes() -> int:
    """Bytes for keys and values: a part of the memory that is free to this process."""
    return min(int(free_host_bytes(_CGROUP) * _CPU_SHARE), _CPU_AT_MOST)


def free_host_bytes(cgroup: Path) -> int:
    """What the machine has available, or the container's limit leaves, whichever is less."""
    free = int(psutil.virtual_memory().available)
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    return free if limit is None or used is None else max(0, min(free, limit - used))


def trim_heap() -> None:
    """Gives memory back to the system that was freed and kept for later; only glibc can be asked to."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


def _number(file: Path) -> int | None:
    """The file's number; None without the file, or when it says "max"."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
