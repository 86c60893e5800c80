"""Memory of the host that two processes have in common: one of them passes the descriptor on to the other.

It has no name and is in no folder; it is gone when the last process is that has it.
"""

import mmap
import os

from batchrun.errors import UsageError


def anonymous(num_bytes: int) -> int:
    """The descriptor of new memory; pages are taken when they are written. Raises UsageError where there is no such."""
    if not hasattr(os, "memfd_create"):
        raise UsageError(
            "--disaggregate needs memory that processes share, which batchrun knows how to get on Linux only"
        )
    descriptor = os.memfd_create("batchrun")
    os.truncate(descriptor, num_bytes)
    return descriptor


def mapped(descriptor: int, num_bytes: int) -> mmap.mmap:
    """The first bytes of the memory, which stay when the descriptor is closed."""
    return mmap.mmap(descriptor, num_bytes)
