"""What can be timed: an operation at a size, and the ways of computing it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


def _itself(returned: Any) -> Tensor:
    assert isinstance(returned, Tensor), returned
    return returned


def _done() -> None:
    """A CPU's calls return when they are done."""


@dataclass(frozen=True, slots=True)
class Way:
    """One implementation. `call(copy)` computes with the copy's memory; `read` makes what it returned comparable."""

    name: str
    call: Callable[[int], Any]
    read: Callable[[Any], Tensor] = _itself


@dataclass(frozen=True, slots=True)
class Prepared:
    """A case with its memory. The first way is ours.

    `reference` states the result for copy 0, from which no way may differ by more than `tolerance` anywhere. There
    are as many copies as make every call find its memory cold. `wait` returns when all that was called is done.
    """

    ways: tuple[Way, ...]
    reference: Callable[[], Tensor]
    tolerance: float
    num_copies: int
    wait: Callable[[], None] = _done


@dataclass(frozen=True, slots=True)
class Case:
    """`num_bytes` must be moved and `num_flops` computed, whatever the implementation."""

    operation: str
    size: str
    num_bytes: int
    num_flops: int
    prepare: Callable[[], Prepared]


# More than a third-level cache, and its neighbours' part of it, can hold.
COLD_BYTES = 128 << 20


def num_cold(num_bytes: int) -> int:
    """Copies of so many bytes that are cold when their turn comes again; at least 2."""
    return max(2, -(-COLD_BYTES // num_bytes))
