"""How long queued work takes on a GPU: replayed as a graph, so that the host's launches are not in it."""

import statistics
from collections.abc import Callable

import torch

# More than the last-level caches of the GPUs there are: written between two runs, it leaves nothing in them.
_FLUSHED_BYTES = 1 << 29
_FEWEST, _MOST = 5, 50


def time_s(run: Callable[[], object], device: torch.device, *, budget_s: float = 0.25) -> float:
    """Median seconds of `run`, with cold caches, of 5 to 50 runs.

    `run` queues work on the current stream, allocates from torch only, and does the same each time.
    """
    with torch.cuda.device(device):
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            # Compiles; nothing may be compiled or loaded while a graph is captured.
            run()
            run()
        torch.cuda.current_stream().wait_stream(beside)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        flushed = torch.empty(_FLUSHED_BYTES, dtype=torch.int8, device=device)
        first = _replayed_s(graph, flushed)
        num = max(_FEWEST, min(_MOST, int(budget_s / max(first, 1e-6))))
        return statistics.median(_replayed_s(graph, flushed) for _ in range(num))


def _replayed_s(graph: torch.cuda.CUDAGraph, flushed: torch.Tensor) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    flushed.zero_()
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000
