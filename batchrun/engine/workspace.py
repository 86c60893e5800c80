"""What the largest step takes of a device beside weights and pool, found out by running it once."""

from typing import Protocol

import numpy as np
import torch

from batchrun.engine.batch import pack
from batchrun.engine.model import Model
from batchrun.engine.request import Request, SamplingParams
from batchrun.engine.sampling import sample
from batchrun.engine.sequence import Sequence
from batchrun.engine.step import Item, ScheduledBatch


class Meter(Protocol):
    def start(self) -> None: ...

    def peak(self) -> int:
        """Bytes that were in use at the most since the start, more than then."""
        ...


class CudaMeter:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0

    def start(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        torch.cuda.synchronize(self._device)
        peak: int = torch.cuda.max_memory_allocated(self._device)
        return peak - self._before


@torch.inference_mode()
def measure_workspace(model: Model, num_tokens: int, num_seqs: int, block_size: int, meter: Meter) -> int:
    """Bytes of a step of `num_tokens` prompt tokens of up to `num_seqs` rows, each of which draws a token at random.

    Raises torch.OutOfMemoryError when there is not so much beside the weights.
    """
    batch, num_blocks = _largest(num_tokens, min(num_seqs, num_tokens), block_size)
    cache = model.make_cache(num_blocks, block_size, len(batch.items))
    meter.start()
    logits = model.forward(pack(batch, block_size, model.place.device), cache)
    sample(logits, batch.sampled, eos_token_ids=())
    return meter.peak()


def _largest(num_tokens: int, num_seqs: int, block_size: int) -> tuple[ScheduledBatch, int]:
    """A step of rows of about the same length, and the blocks that they take."""
    lengths = [num_tokens // num_seqs + (row < num_tokens % num_seqs) for row in range(num_seqs)]
    sampling = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9)
    items, num_blocks = [], 0
    for row, length in enumerate(lengths):
        sequence = Sequence(Request(row, np.zeros(length, np.int32), sampling), arrival=row)
        needed = -(-length // block_size)
        sequence.block_table = list(range(num_blocks, num_blocks + needed))
        sequence.state_slot = row
        num_blocks += needed
        items.append(Item(sequence, 0, length, samples=True))
    return ScheduledBatch(tuple(items)), num_blocks
