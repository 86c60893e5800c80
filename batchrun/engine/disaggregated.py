"""The engine that decodes what another one, elsewhere, has computed the prompts of (disaggregated prefill and decode).

From outside it is an engine like any other. Rows wait here until there are host slots for their keys and values, then
at the other engine, and then as preempted ones do, until they are swapped in. Slots are chosen and freed only here.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from batchrun.engine.engine import Engine, InFlight
from batchrun.engine.handover import Key, Prefill, Prefilled, Prefiller, PrefillerLost, num_handed_over
from batchrun.engine.request import Completion, Request
from batchrun.engine.scheduler import SchedulerConfig
from batchrun.engine.statistics import Counters, Statistics
from batchrun.engine.step import Runner
from batchrun.engine.stop import Decode

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Ordered:
    """A row that is computed elsewhere, into these host slots."""

    request: Request
    host_slots: tuple[int, ...]


class DisaggregatedEngine(Engine):
    """An engine with a prefiller. Without one, when it is lost, it goes on alone, with the rows that were there.

    At most `max_num_seqs` rows are computed ahead of those that run. Counters are those of both engines.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        runner: Runner,
        decode: Decode,
        prefiller: Prefiller,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(config, runner, decode, clock)
        self._prefiller: Prefiller | None = prefiller
        self._queue: deque[Request] = deque()
        self._ordered: dict[Key, _Ordered] = {}
        self._counted = Counters()  # by the prefiller

    @property
    def has_work(self) -> bool:
        return super().has_work or bool(self._queue or self._ordered)

    @property
    def num_waiting(self) -> int:
        return super().num_waiting + len(self._queue)

    def add(self, request: Request) -> None:
        if self._prefiller is None:
            super().add(request)
            return
        assert self.most_tokens(request) <= self.capacity, (request.row_idx, request.max_len, self.capacity)
        self._queue.append(request)
        self._stopwatch.arrive(request, self._clock())

    def step(self) -> list[Completion]:
        """As of any engine. Where nothing can be decoded, waits for a step of the prefiller."""
        if self._prefiller is not None:
            self._exchange(self._prefiller)
        return super().step()

    def _exchange(self, prefiller: Prefiller) -> None:
        """Orders what there is room for, and takes over what is done."""
        self._order(prefiller)
        try:
            for done in prefiller.hear(waits=bool(self._ordered) and not super().has_work):
                self._take_over(done)
        except PrefillerLost as lost:
            _log.warning("the process that computes prompts %s; the rest of the job is computed without it", lost)
            prefiller.close()
            self._go_on_alone()

    def _order(self, prefiller: Prefiller) -> None:
        blocks, prefills = self.scheduler.blocks, []
        while self._queue and len(self._ordered) + self.scheduler.num_preempted < self.scheduler.config.max_num_seqs:
            request = self._queue[0]
            num_slots = blocks.blocks_for(num_handed_over(request))
            fits = num_slots <= blocks.num_host_slots and num_handed_over(request) + 2 <= prefiller.capacity
            if not num_slots or not fits:
                self.scheduler.add(self._queue.popleft())
                continue
            host_slots = blocks.lend_host_slots(num_slots)
            if not host_slots:
                break
            self._ordered[request.key] = _Ordered(self._queue.popleft(), host_slots)
            prefills.append(Prefill.of(request, host_slots))
        if prefills:
            # Slots may be free whose blocks are still being copied to the device.
            self._runner.wait_for_copies()
            prefiller.order(prefills)

    def _take_over(self, done: Prefilled) -> None:
        self._counted, self.busy_elsewhere_s = done.counters, done.busy_s
        for key in done.filled:
            row = self._ordered.pop(key)
            self.scheduler.take_over(row.request, row.host_slots)
        for key in done.failed:
            self._leave_to_scheduler(self._ordered.pop(key))

    def _leave_to_scheduler(self, row: _Ordered) -> None:
        self.scheduler.blocks.take_back(row.host_slots)
        self.scheduler.add(row.request)

    def _go_on_alone(self) -> None:
        self._prefiller = None
        for row in self._ordered.values():
            self._leave_to_scheduler(row)
        for request in self._queue:
            self.scheduler.add(request)
        self._ordered.clear()
        self._queue.clear()

    def stop_admitting(self) -> tuple[Request, ...]:
        """As of any engine; rows at the prefiller have begun."""
        queued = tuple(self._queue)
        self._queue.clear()
        for request in queued:
            self._stopwatch.forget(request.key)
        return (*super().stop_admitting(), *queued)

    def in_flight(self) -> tuple[InFlight, ...]:
        ahead = (row.request for row in self._ordered.values())
        return (*super().in_flight(), *(InFlight(request.row_idx, request.output_ids) for request in ahead))

    @property
    def description(self) -> str:
        return f"{super().description}; {len(self._ordered)} rows at the prefiller, {len(self._queue)} before it"

    def statistics(self) -> Statistics:
        here = super().statistics()
        return replace(
            here,
            counters=here.counters + self._counted,
            num_waiting=self.num_waiting + len(self._ordered),
        )
