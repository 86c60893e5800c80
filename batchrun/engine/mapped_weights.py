"""Which of this process's memory is safetensors files, mapped: what is read of them stays until it is forgotten."""

import ctypes
import mmap
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

_MAPS = Path("/proc/self/maps")


@dataclass(frozen=True, slots=True)
class MappedWeights:
    """`ranges` are addresses; there are none where the system does not tell them."""

    ranges: tuple[range, ...]

    @classmethod
    def find(cls) -> "MappedWeights":
        """As it is now."""
        lines = _MAPS.read_text(errors="replace").splitlines() if _MAPS.exists() else []
        spans = [line.split()[0].split("-") for line in lines if line.endswith(".safetensors")]
        return cls(tuple(range(int(begin, 16), int(end, 16)) for begin, end in spans))

    def forget(
        self,
        weight: Tensor,  # contiguous
    ) -> None:
        """Gives back the memory of a weight that is as the file has it; whoever reads it, reads the file again.

        A weight of no mapped file is left alone.
        """
        begin, num_bytes, page = weight.data_ptr(), weight.nbytes, mmap.PAGESIZE
        if not any(begin in mapped and begin + num_bytes <= mapped.stop for mapped in self.ranges):
            return
        # Its first and last page may hold a part of another weight.
        first, last = -(-begin // page) * page, (begin + num_bytes) // page * page
        if first < last:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)
