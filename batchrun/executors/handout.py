"""A plan's pending rows as leases that can be sent: what a place in the plan's order stands for.

Reads the units; knows neither workers nor how rows are shared out among them.
"""

from collections.abc import Mapping
from functools import cache

import numpy as np
from numpy.typing import NDArray

from batchrun.executors.messages import Lease, LeasedUnit, packed
from batchrun.job import Job
from batchrun.leases import Places
from batchrun.pending import PendingUnit
from batchrun.plan.params import merged


class Handout:
    """Pending rows by their place in the plan's order, from 0 on over all units."""

    def __init__(self, job: Job, units: list[PendingUnit]) -> None:
        self._units = [unit for unit in units if len(unit.positions)]
        self._starts = np.cumsum([0, *(len(unit.positions) for unit in self._units)])
        none = np.empty(0, dtype=np.int64)
        self.row_idx: NDArray[np.int64] = np.concatenate([none, *(unit.row_idx for unit in self._units)])
        keep_len = np.concatenate([none, *(unit.keep_len for unit in self._units)])
        # What each shares with the pending row before it.
        self.shared_len: NDArray[np.int32] = np.concatenate([[0], keep_len])[: len(keep_len)].astype(np.int32)
        total = np.concatenate([none, *(_work(job, unit) for unit in self._units)])
        self.work: NDArray[np.int64] = total - self.shared_len.astype(np.int64)

    def place_of(self, row_idx: int) -> int | None:
        """Where the row stands; None when it is not pending."""
        found = np.flatnonzero(self.row_idx == row_idx)
        return int(found[0]) if len(found) else None

    def lease(
        self,
        places: Places,
        num_ahead: int,
        output_ids: Mapping[int, tuple[int, ...]],
        num_given_up: Mapping[int, int],
    ) -> Lease:
        """The rows at these places, with what is known of some rows by their numbers."""
        unit_of = np.searchsorted(self._starts, places, side="right") - 1
        cuts = np.flatnonzero(np.diff(unit_of)) + 1
        units = []
        for part in np.split(places, cuts):
            at = int(np.searchsorted(self._starts, part[0], side="right")) - 1
            unit = self._units[at]
            units.append(LeasedUnit(unit.index, packed(unit.rows(part - self._starts[at]))))
        rows = self.row_idx[places].tolist()
        return Lease(
            tuple(units),
            num_ahead,
            {row: output_ids[row] for row in rows if row in output_ids},
            {row: num_given_up[row] for row in rows if row in num_given_up},
        )


def _work(job: Job, unit: PendingUnit) -> NDArray[np.int64]:
    """Tokens of each pending row's prompt, and of its output as far as one can foresee it."""

    @cache
    def output_len(params: str | None) -> int:
        sampling = merged(job.sampling, params)
        # What ends by itself ends about in the middle.
        return sampling.max_tokens if sampling.ignore_eos else sampling.max_tokens // 2

    if job.task != "generate":
        return unit.prompt_len
    params = unit.table.column("params").take(unit.positions).to_pylist()
    outputs = np.fromiter(map(output_len, params), dtype=np.int64, count=len(params))
    return unit.prompt_len + outputs * job.num_beams
