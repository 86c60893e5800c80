"""One thing to be timed: what it must move and compute at least, and how to know that it is right."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Size:
    """A model's sizes, and the dtype of all its numbers."""

    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    inner: int
    vocab: int
    block_size: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Of one layer's keys and values of a token."""
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def tolerance(self) -> float:
        """Two roundings of the dtype, each half a unit in the last place, of the largest number; float32: of sums."""
        return {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-5}[self.dtype]


@dataclass(frozen=True, slots=True)
class Load:
    """How much a step holds, in tokens where nothing else is said."""

    batch: int  # rows that decode
    contexts: tuple[int, int]  # from, to
    chunk: int
    behind: tuple[int, ...]  # computed before the chunk
    prefixes: tuple[int, ...]  # shared by all rows of the batch
    suffix: int  # of each row behind the prefix
    tokens: tuple[int, ...]  # in the batches of the layers' kernels
    scored: int
    swapped: int


LLAMA_8B = Size(32, 32, 8, 128, 4096, 14336, 128256, 16, torch.bfloat16)
FULL = Load(256, (300, 8000), 2048, (0, 8192, 32768), (256, 1024, 4096, 8192), 256, (256, 8192), 8192, 2048)
# For a CPU, under Triton's interpreter: everything once, in a few programs.
TINY = Size(2, 6, 2, 24, 70, 70, 300, 4, torch.float32)
SMALL = Load(11, (5, 40), 7, (0, 21), (256,), 9, (3,), 5, 17)


@dataclass(frozen=True, slots=True)
class Checked:
    """The largest error, and the largest that is right; both absolute."""

    error: float
    allowed: float

    @property
    def is_right(self) -> bool:
        """Written so that NaN is wrong."""
        return self.error <= self.allowed


@dataclass(frozen=True, slots=True)
class Trial:
    """A workload with its tensors on a device. `run` queues it; `check` runs it and compares, some of it at least."""

    run: Callable[[], object]
    check: Callable[[], Checked]


@dataclass(frozen=True, slots=True)
class Workload:
    """`num_bytes` and `flops` are the least that any way of computing it moves and does."""

    kernel: str
    shape: str
    num_bytes: int
    flops: int
    prepare: Callable[[torch.device], Trial]


def compared(got: torch.Tensor, expected: torch.Tensor, relative: float) -> Checked:
    """Allowed is `relative` of the largest magnitude expected."""
    error = (got.double() - expected.double()).abs().max()
    return Checked(float(error), relative * float(expected.abs().max()))
