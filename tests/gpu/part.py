"""A part of the GPU script: what it would do, said without a device, and what it found."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a part runs: a GPU at full size, or a CPU, where a part does what it can at a tiny size."""

    device: torch.device

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"


@dataclass(frozen=True, slots=True)
class Result:
    """`is_right` says whether what was checked holds; `numbers` are in SI units."""

    part: str
    name: str
    is_right: bool
    words: str
    numbers: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"  {'ok  ' if self.is_right else 'FAIL'} {self.name}: {self.words}"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Part:
    """Runs in a process of its own, which is ended after `limit_s`; what it has yielded by then counts."""

    name: str
    purpose: str
    limit_s: int
    plan: Callable[[], Iterator[str]]
    run: Callable[[Machine], Iterator[Result]]


def attempt(part: str, name: str, work: Callable[[], Result]) -> Result:
    """The result, or what was raised instead as one that is wrong."""
    try:
        return work()
    except Exception as error:
        reason = (str(error).strip() or "no message").splitlines()[0][:300]
        return Result(part, name, False, f"{type(error).__name__}: {reason}")
