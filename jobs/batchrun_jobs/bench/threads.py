"""The threads that every child has, and the cores that they are bound to."""

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from batchrun.errors import UsageError

_CPUS = Path("/sys/devices/system/cpu")


@dataclass(frozen=True, slots=True)
class Threads:
    """One thread a core: the number of threads is that of `cpus`, and if they are pinned each has its own."""

    cpus: tuple[int, ...]
    is_pinned: bool

    @classmethod
    def choose(cls, count: int | None, pin: bool) -> "Threads":
        """`count` of the cores that this process may use; None: all of them.

        Raises UsageError when there are not so many.
        """
        cores = one_a_core(os.sched_getaffinity(0), _CPUS)
        if count is not None and not 1 <= count <= len(cores):
            raise UsageError(f"--threads {count}: this process may use {len(cores)} cores")
        return cls(cores[:count], pin)

    @property
    def environment(self) -> dict[str, str]:
        """For OpenMP, which is what torch and most peers compute with; the others are told by `Given`."""
        chosen = {"OMP_NUM_THREADS": str(len(self.cpus))}
        if self.is_pinned:
            chosen |= {"OMP_PROC_BIND": "true", "OMP_PLACES": ",".join(f"{{{cpu}}}" for cpu in self.cpus)}
        return chosen


def one_a_core(cpus: Collection[int], folder: Path) -> tuple[int, ...]:
    """The first of `cpus` on each core, by what `folder` says of their topology; all, where it says nothing."""
    first_of: dict[str, int] = {}
    for cpu in sorted(cpus):
        siblings = folder / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        first_of.setdefault(siblings.read_text().strip() if siblings.exists() else str(cpu), cpu)
    return tuple(first_of.values())
