"""What a plan will take: bytes of keys and values. Plain arithmetic; knows nothing of devices or tensors."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from batchrun.job import Job

_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def element_bytes(job: "Job") -> int:
    """Bytes of one element of the KV cache; for `auto` those of the device asked for, or the larger one."""
    if job.dtype == "auto":
        return 2 if job.device == "cuda" else 4
    return _ELEMENT_BYTES[job.dtype]


class PeakTokens:
    """The most tokens that `num_seqs` neighbours in plan order occupy, in whole blocks, when all are at full length.

    Blocks that neighbours share count once. One that they share in part each has for itself, as each has the one of its
    prompt's last token, which it computes.
    """

    def __init__(self, num_seqs: int, block_size: int) -> None:
        self._num_seqs = num_seqs
        self._block_size = block_size
        # Of the last rows, up to `num_seqs` of them: what each shares with the row before it, and what it adds.
        self._shared = np.empty(0, dtype=np.int64)
        self._added = np.empty(0, dtype=np.int64)
        self.tokens = 0

    def add(self, shared: NDArray[np.int64], prompt_len: NDArray[np.int64], output_len: NDArray[np.int64]) -> None:
        """The next rows; `shared` [num_rows] is what each has in common with the row before it. All in tokens."""
        size = self._block_size
        shared = np.minimum(shared, prompt_len - 1) // size * size
        self._shared = np.concatenate([self._shared, shared])
        self._added = np.concatenate([self._added, -(-(prompt_len + output_len) // size) * size - shared])
        done = np.concatenate([[0], np.cumsum(self._added)])
        width = min(self._num_seqs, len(self._added))
        # The first row of a window brings its whole prompt.
        windows = done[width:] - done[: len(done) - width] + self._shared[: len(done) - width]
        self.tokens = max(self.tokens, int(windows.max(initial=0)))
        self._shared, self._added = self._shared[-self._num_seqs :], self._added[-self._num_seqs :]
