"""Log-probabilities and hidden states of given tokens, out of the hidden states behind them.

The head is applied to a bounded number of positions at a time, so that the logits of a whole step never exist at once.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchrun.engine.queues import Event, to_device
from batchrun.engine.request import PooledHidden, TokenLogprobs
from batchrun.engine.sequence import Sequence
from batchrun.engine.step import Item, Sampled, ScheduledBatch
from batchrun.engine.swap import HostPool

# Positions at a time: [64, vocab] of float32 are 12 MB with 49,152 tokens and 67 MB with 262,144.
_POSITIONS_AT_ONCE = 64


def read(
    hidden: Tensor,  # [num_positions, hidden_size], behind the items' `read_positions`
    items: tuple[Item, ...],
    logits_of: Callable[[Tensor], Tensor],  # [num, hidden_size] -> [num, vocab]
) -> Tensor:
    """float64 [num_read, 2] where items read `TokenLogprobs`: each and whether no token is likelier, item after item.

    Of items that read `PooledHidden`, float64 [num_items, hidden_size]: sums over what each reads.
    """
    counts = [len(item.read_positions) for item in items]
    if isinstance(items[0].sequence.request.reads, PooledHidden):
        parts = torch.split(hidden, counts)
        return torch.stack([part.double().sum(dim=0) for part in parts])
    places, token_ids = _entries(items, counts)
    rows = to_device(places, hidden.device)
    ids = to_device(token_ids, hidden.device)
    bounds = np.searchsorted(places, np.arange(0, len(hidden) + _POSITIONS_AT_ONCE, _POSITIONS_AT_ONCE)).tolist()
    found = [hidden.new_empty((0, 2), dtype=torch.float64)]
    for chunk, (begin, end) in enumerate(pairwise(bounds)):
        first = chunk * _POSITIONS_AT_ONCE
        logprobs = logits_of(hidden[first : first + _POSITIONS_AT_ONCE]).float().log_softmax(dim=-1)
        own = rows[begin:end] - first
        values, best = logprobs[own, ids[begin:end]], logprobs.amax(dim=-1)[own]
        found.append(torch.stack([values.double(), (values >= best).double()], dim=-1))
    return torch.cat(found)


@dataclass(frozen=True, slots=True)
class Read:
    """What was read in some items of a step, as `read` has it."""

    items: tuple[Item, ...]
    readings: Tensor


@dataclass(frozen=True, slots=True)
class Reading:
    """`step.Launched` of a step in which rows are read; more than one part: it was split, for lack of memory."""

    batch: ScheduledBatch
    parts: tuple[Read, ...]  # on the host once `ended` is over
    ended: Event
    host: HostPool

    def wait(self) -> Sampled:
        self.ended.wait()
        moved = self.host.take_costs()
        found: defaultdict[Sequence, list[NDArray[np.float64]]] = defaultdict(list)
        for part in self.parts:
            for item, reading in zip(part.items, _by_item(part.readings.numpy(), part.items), strict=True):
                found[item.sequence] += [reading] if len(reading) else []
        readings = tuple(_joined(item, found[item.sequence]) for item in self.batch.items)
        return Sampled(np.empty(0, np.int32), moved.num_bytes, moved.seconds, len(self.parts) > 1, readings=readings)


def _joined(item: Item, parts: list[NDArray[np.float64]]) -> NDArray[np.float64]:
    """What was read in an item that may have been computed in parts."""
    if not parts:
        return np.empty(0)
    is_pooled = isinstance(item.sequence.request.reads, PooledHidden)
    joined: NDArray[np.float64] = np.sum(parts, axis=0) if is_pooled else np.concatenate(parts)
    return joined


def _by_item(readings: NDArray[np.float64], items: tuple[Item, ...]) -> list[NDArray[np.float64]]:
    """For each item what was read in it; empty where nothing was."""
    if isinstance(items[0].sequence.request.reads, PooledHidden):
        nothing = np.empty(0)
        return [row if len(item.read_positions) else nothing for row, item in zip(readings, items, strict=True)]
    spans = [item.reading_span for item in items]
    return np.split(readings, np.cumsum([span.stop - span.start for span in spans])[:-1])


def _entries(items: tuple[Item, ...], counts: list[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of everything that is read: in which row of the hidden states, and which token; both int64 [num_read]."""
    places, token_ids = [], []
    for item, first in zip(items, np.cumsum(counts) - counts, strict=True):
        reads, span = item.sequence.request.reads, item.reading_span
        assert isinstance(reads, TokenLogprobs), "rows of one job are read alike"
        places.append(first + np.searchsorted(item.read_positions, reads.positions[span]))
        token_ids.append(reads.token_ids[span])
    return np.concatenate(places).astype(np.int64), np.concatenate(token_ids).astype(np.int64)
