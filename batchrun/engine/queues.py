"""Queues of a device, the order between them, and how the host hands things over without waiting.

A queue carries out what it is given one after another, at some time; what two queues do is ordered by events only.
On a CPU everything is carried out at once.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor


class Event(Protocol):
    """A point in a queue's work."""

    def is_over(self) -> bool:
        """Whether all the work before it is done."""
        ...

    def wait(self) -> None:
        """Returns when it is."""
        ...

    def seconds_until(self, later: Any) -> float:
        """Between two events of a queue that are over."""
        ...


class Queue(Protocol):
    """Work in its order. `Event`s are those of its own kind."""

    def run(self, work: Callable[[], None]) -> None:
        """Does `work` behind everything given before; what `work` reads must stay as it is until then."""
        ...

    def record(self) -> Event:
        """The point behind everything given so far."""
        ...

    def wait_for(self, event: Any) -> None:
        """Nothing given from now on begins before the event, which is another queue's."""
        ...


@dataclass(frozen=True, slots=True)
class Moment:
    """An event that is over."""

    seconds: float

    def is_over(self) -> bool:
        return True

    def wait(self) -> None:
        return

    def seconds_until(self, later: "Moment") -> float:
        return later.seconds - self.seconds


class AtOnce:
    """A queue that has nothing in it, ever."""

    def run(self, work: Callable[[], None]) -> None:
        work()

    def record(self) -> Moment:
        return Moment(time.perf_counter())

    def wait_for(self, event: Moment) -> None:
        return


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def is_over(self) -> bool:
        is_over: bool = self.event.query()  # type: ignore[no-untyped-call]
        return is_over

    def wait(self) -> None:
        self.event.synchronize()

    def seconds_until(self, later: "_CudaEvent") -> float:
        milliseconds: float = self.event.elapsed_time(later.event)
        return milliseconds / 1000


class CudaQueue:
    """A stream of a GPU. Not run in the tests of a machine without one."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def run(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def record(self) -> _CudaEvent:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return _CudaEvent(event)

    def wait_for(self, event: _CudaEvent) -> None:
        self._stream.wait_event(event.event)


@dataclass(frozen=True, slots=True)
class Queues:
    """`compute` is where the forward pass runs; `copies` moves blocks to and from the host beside it."""

    compute: Queue
    copies: Queue


def queues_of(device: torch.device) -> Queues:
    """The compute queue is the stream that is current now."""
    if device.type != "cuda":
        return Queues(AtOnce(), AtOnce())
    return Queues(CudaQueue(torch.cuda.current_stream(device)), CudaQueue(torch.cuda.Stream(device)))  # type: ignore[no-untyped-call]


def to_host(tensor: Tensor) -> Tensor:
    """The tensor on the host, once what the current stream was given so far is done; on a CPU the tensor itself."""
    if not tensor.is_cuda:
        return tensor
    copied = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copied.copy_(tensor, non_blocking=True)


def to_device(values: NDArray[Any], device: torch.device) -> Tensor:
    """The array on the device, for what the current stream does next. On a CPU it shares the array's memory."""
    tensor = torch.from_numpy(values)
    return tensor if device.type != "cuda" else tensor.pin_memory().to(device, non_blocking=True)
