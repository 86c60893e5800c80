"""Decode steps as device graphs: hundreds of kernels launched as one, once a step of the same shape was recorded.

A graph replays the same kernels on the same memory. So steps are padded to a few sizes, and a step's tokens and plan
are copied over those that the graph was recorded with.
"""

import logging
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from batchrun.engine.batch import ForwardBatch, Padding
from batchrun.engine.step import ScheduledBatch
from batchrun_kernels import GraphPlan

# Sizes of padded steps, in tokens: at most a seventh more than there are, from 8 on.
_SIZES = (1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 257, 32), 320, 384, 448, 512)
_GRAPHS_AT_MOST = 96
_log = logging.getLogger(__name__)


Forward = Callable[[ForwardBatch, Any], Tensor]
# Calls a function so that its kernels are recorded; its result, and what replays them into the same memory.
Record = Callable[[Callable[[], Tensor]], tuple[Tensor, Callable[[], None]]]


@dataclass(frozen=True, slots=True)
class _Graph:
    batch: ForwardBatch
    plan: GraphPlan
    logits: Tensor
    replay: Callable[[], None]


class StepGraphs:
    """Runs steps by `forward`, or by a graph of it where a step of the shape has been seen before.

    Least recently used graphs go when there are too many. Where recording fails it is not tried again.
    """

    def __init__(self, forward: Forward, record: Record, scratch_slot: int) -> None:
        """`scratch_slot` is a slot of the pool that no block table names."""
        self._forward = forward
        self._record: Record | None = record
        self._scratch_slot = scratch_slot
        self._seen: Counter[Hashable] = Counter()
        self._graphs: OrderedDict[Hashable, _Graph] = OrderedDict()

    @property
    def num_recorded(self) -> int:
        return len(self._graphs)

    def padding(self, batch: ScheduledBatch) -> Padding | None:
        """How a step must be padded to be run here; None: it cannot be, with more than a token a row, or too many."""
        num = len(batch.items)
        is_decode = batch.num_tokens == num and not batch.slot_copies
        if not is_decode or num > _SIZES[-1] or (self._record is None and not self._graphs):
            return None
        size = _SIZES[bisect_left(_SIZES, num)]
        return Padding(size, size, self._scratch_slot)

    def run(self, batch: ForwardBatch, plan: GraphPlan) -> Tensor:
        """Logits [num_sampled, vocab] of a padded step; they are overwritten by the next step."""
        shape = batch.input_ids.shape[1], plan.shape
        graph = self._graphs.get(shape)
        if graph is None:
            self._seen[shape] += 1
            if self._record is None or self._seen[shape] == 1:
                return self._forward(batch, plan)
            graph = self._recorded(batch, plan, self._record)
            if graph is None:
                return self._forward(batch, plan)
            self._graphs[shape] = graph
            if len(self._graphs) > _GRAPHS_AT_MOST:
                self._graphs.popitem(last=False)
        else:
            self._graphs.move_to_end(shape)
            graph.batch.refill(batch)
            graph.plan.refill(plan)
        graph.replay()
        return graph.logits

    def _recorded(self, batch: ForwardBatch, plan: GraphPlan, record: Record) -> _Graph | None:
        try:
            logits, replay = record(lambda: self._forward(batch, plan))
        except RuntimeError as error:  # lack of memory is one, too
            reason = str(error).strip().splitlines()[0]
            _log.warning("no more steps are recorded as device graphs, which makes decoding slower: %s", reason)
            self._record = None
            return None
        return _Graph(batch, plan, logits, replay)


class CudaRecorder:
    """Records CUDA graphs, which share one pool of memory. Not run in the tests of a machine without a GPU."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(current)
        with torch.cuda.stream(side):
            work()  # what kernels compile or allocate at their first call is not to be recorded
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = work()
        return result, graph.replay
