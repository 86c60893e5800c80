"""How many cores this process may use, and how many threads its computing is to have. Imports no torch."""

import os
import sys


def num_cores() -> int:
    """Those that this process may use; the same before and after torch is imported."""
    num_here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch = sys.modules.get("torch")
    # With OMP_PROC_BIND, torch's OpenMP has bound this thread to one of them, and has counted them before.
    return num_here if torch is None else max(num_here, torch.get_num_threads())


def num_threads() -> int:
    """What OMP_NUM_THREADS says, else the cores."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdigit() else num_cores()
