"""Carries out the scheduler's steps with a model's tensors: swap, pack, forward, sample."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor

from batchrun.engine.allowed import allowed_tokens
from batchrun.engine.batch import Samples, pack
from batchrun.engine.logprobs import Logprobs, joined, logprobs_of
from batchrun.engine.memory import is_out_of_memory
from batchrun.engine.model import Model
from batchrun.engine.queues import Event, to_host
from batchrun.engine.ranks import LedShards
from batchrun.engine.reading import Read, Reading, read
from batchrun.engine.runner_facts import RunnerFacts
from batchrun.engine.runner_options import RunnerOptions
from batchrun.engine.sampling import if_finite, sample, takes_likeliest
from batchrun.engine.shard import Shard, Shards
from batchrun.engine.step import Launched, Sampled, ScheduledBatch
from batchrun.engine.swap import HostPool
from batchrun.errors import EngineFailed

if TYPE_CHECKING:
    from batchrun.checkpoint import Checkpoint

# Up to so many rows a product on a CPU takes about as long as reading its weights does.
_FREE_ON_CPU = 8
_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


class TorchRunner:
    """`step.Runner` over a transformers model and a pool of blocks.

    A step that does not fit the device's memory is computed in halves, and again in halves.
    """

    def __init__(self, shard: Shard, eos_token_ids: tuple[int, ...], led: Shards | None = None) -> None:
        """`led`: the shards of all ranks, where there are more than this process's `shard`."""
        self._shard = shard
        self._shards: Shards = led or shard
        # Of several ranks none has all logits' weights.
        self._is_alone = led is None
        self._eos_token_ids = eos_token_ids
        self._last: Samples | None = None
        states = shard.cache.states
        self.block_size = shard.cache.block_size
        self.num_blocks = shard.num_blocks
        self.num_host_slots = shard.host.num_slots
        self.num_state_slots = states.num_slots if states is not None else 0
        self.block_bytes = shard.cache.block_bytes
        kv_dtype, kernel = shard.model.kv_place.dtype, shard.cache.attention.name
        self.block_format = f"{self.block_bytes} bytes of {kv_dtype}, as {kernel} attention has them"
        self.is_gpu = shard.model.place.is_cuda
        # Other ranks know only tokens that are on the host.
        self.overlaps = self.is_gpu and led is None
        self.num_free_tokens = 0 if self.is_gpu or self.num_state_slots else _FREE_ON_CPU

    @classmethod
    def build(cls, checkpoint: "Checkpoint", options: RunnerOptions) -> "TorchRunner":
        """Loads the weights and lays out the pool; see `Shard.load`, and of several ranks `LedShards.load`."""
        led = LedShards.load(checkpoint, options) if options.num_ranks > 1 else None
        shard = led.shard if led is not None else Shard.load(checkpoint, options)
        return cls._of(shard, checkpoint.spec.eos_token_ids, led)

    @classmethod
    def lay_out(cls, model: Model, options: RunnerOptions, eos_token_ids: tuple[int, ...]) -> "TorchRunner":
        """A runner for a loaded model; see `Shard.lay_out`."""
        return cls._of(Shard.lay_out(model, options), eos_token_ids)

    @classmethod
    def _of(cls, shard: Shard, eos_token_ids: tuple[int, ...], led: Shards | None = None) -> "TorchRunner":
        runner = cls(shard, eos_token_ids, led)
        facts = runner.facts
        _log.info("%s, %s, %s attention; %s", facts.device, facts.dtype, facts.kernel, facts.memory)
        return runner

    @property
    def facts(self) -> RunnerFacts:
        model = self._shard.model
        return RunnerFacts(
            device=str(model.place.device),
            dtype=str(model.place.dtype).removeprefix("torch."),
            kv_dtype=str(model.kv_place.dtype).removeprefix("torch."),
            kernel=self._shard.cache.attention.name,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            pool_bytes=self.num_blocks * self.block_bytes,
            num_state_slots=self.num_state_slots,
            state_bytes=self.num_state_slots * model.state_bytes,
            host_bytes=self.num_host_slots * self.block_bytes,
        )

    @property
    def num_graphs(self) -> int:
        """Steps that are recorded as device graphs."""
        return self._shard.graphs.num_recorded if self._shard.graphs is not None else 0

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> Launched:
        """Raises EngineFailed when not even a single token fits the device's memory."""
        for out in batch.swap_outs:
            self._shards.copy_out(out)
        for back in batch.swap_ins:
            self._shards.copy_in(back)
        if batch.reads:
            return self._launch_reading(batch)
        nothing = _Chosen(self._shard.model.place.new_empty(0, dtype=torch.int64))
        # All rows of a job ask for them or none does; with beams some may ask for more.
        asked = [item.sequence.request.num_logprobs for item in batch.items]
        num_top = max((num for num in asked if num is not None), default=None)
        parts = self._split(batch, partial(self._sample, num_top)) if batch.items else [nothing]
        tokens = torch.cat([part.tokens for part in parts])
        logprobs = [part.logprobs.on_host() for part in parts if part.logprobs is not None]
        self._last = Samples(tokens, {item.sequence: place for place, item in enumerate(batch.sampled)})
        on_host = to_host(tokens)
        ended = self._shard.queues.compute.record()
        return _Computing(on_host, logprobs, ended, self._shard.host, was_split=len(parts) > 1)

    def wait_for_copies(self) -> None:
        self._shard.host.wait()

    def close(self) -> None:
        self._shards.close()

    def _launch_reading(self, batch: ScheduledBatch) -> Launched:
        parts = self._split(batch, self._read)
        on_host = tuple(Read(part.items, to_host(part.readings)) for part in parts)
        return Reading(batch, on_host, self._shard.queues.compute.record(), self._shard.host)

    def _sample(self, num_top: int | None, batch: ScheduledBatch) -> "_Chosen":
        """`num_top` likeliest tokens are told of each; None: no log-probability."""
        if (
            num_top is None
            and self._is_alone
            and self._shard.finds_likeliest
            and all(map(takes_likeliest, batch.sampled))
        ):
            forward = pack(batch, self.block_size, self._shard.model.place.device, last=self._last)
            return _Chosen(if_finite(*self._shard.likeliest(forward)))
        logits = self._logits(batch)
        # A copy: what is masked for sampling counts all the same.
        raw = logits.clone() if num_top is not None else None
        # A GPU computes the logits meanwhile.
        allowed = allowed_tokens(batch, self._eos_token_ids)
        tokens = sample(logits, batch.sampled, self._eos_token_ids, allowed)
        return _Chosen(tokens, None if raw is None or num_top is None else logprobs_of(raw, tokens, num_top))

    def _read(self, batch: ScheduledBatch) -> Read:
        forward = pack(batch, self.block_size, self._shard.model.place.device)
        hidden = self._shards.hidden(forward)
        return Read(batch.items, read(hidden, batch.items, self._shards.head))

    def _split(self, batch: ScheduledBatch, compute: Callable[[ScheduledBatch], _Result]) -> list[_Result]:
        """What `compute` makes of the step; more than one: the step was split, for lack of memory."""
        self._shard.cache.commit()
        try:
            return [compute(batch)]
        except (MemoryError, RuntimeError) as error:
            self._shard.cache.discard()
            if not is_out_of_memory(error):
                raise
            if not batch.can_be_halved:
                raise EngineFailed(
                    "the device has not the memory to compute a single token; lower --kv-cache-memory or "
                    "--gpu-memory-utilization, or --max-num-seqs"
                ) from error
        _log.warning("a step of %d tokens does not fit the device's memory; steps become smaller", batch.num_tokens)
        if self.is_gpu:
            torch.cuda.empty_cache()
        return [part for half in batch.halves() for part in self._split(half, compute)]

    def _logits(self, batch: ScheduledBatch) -> Tensor:
        """[num_sampled, vocab]."""
        graphs = self._shard.graphs
        padding = graphs.padding(batch) if graphs is not None else None
        device = self._shard.model.place.device
        forward = pack(batch, self.block_size, device, last=self._last, padding=padding)
        if graphs is None or padding is None:
            return self._shards.logits(forward)
        return graphs.run(forward, self._shard.cache.attention.plan(forward.work))[: len(batch.sampled)]


@dataclass(frozen=True, slots=True)
class _Chosen:
    """What was sampled, on the device. All rows of a job ask for the same log-probabilities, or for none."""

    tokens: Tensor  # int64 [num_sampled]
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class _Computing:
    """`step.Launched`: `tokens` and `logprobs` are on the host once `ended` is over."""

    tokens: Tensor  # int64 [num_sampled]
    logprobs: list[Logprobs]
    ended: Event
    host: HostPool
    was_split: bool

    def wait(self) -> Sampled:
        self.ended.wait()
        moved = self.host.take_costs()
        logprobs = joined(self.logprobs).listed() if self.logprobs else ()
        return Sampled(self.tokens.numpy().astype(np.int32), moved.num_bytes, moved.seconds, self.was_split, logprobs)
