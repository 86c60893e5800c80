"""A rank's part of a model and of the block pool, and what it does in a step; of one rank it is the whole.

Owns everything of a step that is done with tensors, up to logits or hidden states. Knows nothing of sequences, and
chooses no token.
"""

from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from batchrun.engine.batch import ForwardBatch
from batchrun.engine.graphs import CudaRecorder, StepGraphs
from batchrun.engine.group import Group
from batchrun.engine.head import Halves
from batchrun.engine.invariance import require_fixed_kernels
from batchrun.engine.kv_cache import KVCache
from batchrun.engine.memory import cpu_pool_bytes, gpu_pool_bytes
from batchrun.engine.model import Model
from batchrun.engine.queues import Queues, queues_of
from batchrun.engine.runner_options import RunnerOptions, choose_device, choose_dtype, choose_kv_dtype
from batchrun.engine.step import SwapIn, SwapOut
from batchrun.engine.swap import HostPool
from batchrun.engine.workspace import CudaMeter, measure_workspace
from batchrun.errors import ModelUnavailable, UsageError

if TYPE_CHECKING:
    from batchrun.checkpoint import Checkpoint

_SWAP_AT_MOST = 4 << 30


class Shards(Protocol):
    """All shards of a model. A call is carried out by each of them; the result is the same for all."""

    def copy_out(self, out: SwapOut) -> None:
        """Blocks to the host."""
        ...

    def copy_in(self, back: SwapIn) -> None:
        """Blocks from the host."""
        ...

    def logits(self, step: ForwardBatch) -> Tensor:
        """[num_sampled, vocab]; writes the step's keys and values."""
        ...

    def hidden(self, step: ForwardBatch) -> Tensor:
        """[num_sampled, hidden_size], as the head gets it; writes the step's keys and values."""
        ...

    def head(
        self,
        hidden: Tensor,  # [num, hidden_size]
    ) -> Tensor:
        """[num, vocab]."""
        ...

    def close(self) -> None:
        """Ends what was started for them; no call after it."""
        ...


class Shard:
    """`Shards` of one rank. `num_blocks` of the cache's blocks are for sequences; `graphs`, if any, know what the rest
    is for. Without the `halves` of the model there are no hidden states."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        host: HostPool,
        *,
        num_blocks: int,
        queues: Queues,
        graphs: StepGraphs | None = None,
        halves: Halves | None = None,
    ) -> None:
        self.model = model
        self.cache = cache
        self.host = host
        self.num_blocks = num_blocks
        self.queues = queues
        self.graphs = graphs
        self._halves = halves

    @classmethod
    def load(cls, checkpoint: "Checkpoint", options: RunnerOptions, group: Group | None = None) -> "Shard":
        """Loads the weights and lays out the pool: this rank's of the group, where there is one.

        Raises ModelUnavailable when the model or the device cannot be used, UsageError when the memory given
        holds not a single block, or is not there.
        """
        assert checkpoint.folder is not None, "a checkpoint without files has no tensors"
        device = choose_device(options.device)
        dtype = choose_dtype(options.dtype, device)
        if options.deterministic:
            require_fixed_kernels(device, dtype)
        try:
            model = Model.load(
                checkpoint.folder,
                dtype=dtype,
                device=device,
                trust_remote_code=options.trust_remote_code,
                kv_dtype=choose_kv_dtype(options.kv_cache_dtype, dtype),
                quantization=options.quantization,
                is_deterministic=options.deterministic,
                num_ranks=options.num_ranks,
            )
        except torch.OutOfMemoryError as error:
            raise ModelUnavailable(
                f"{checkpoint.spec.name} does not fit the memory of {device}; name a smaller model with -m, "
                "--dtype bfloat16 where it is float32, or --tensor-parallel to divide it among several"
            ) from error
        try:
            return cls.lay_out(model, options, group)
        except torch.OutOfMemoryError as error:
            remedy = "--kv-cache-memory" if options.kv_cache_memory is not None else "--max-num-batched-tokens"
            raise UsageError(f"{device} has not the memory for keys, values and a step; lower {remedy}") from error

    @classmethod
    def lay_out(cls, model: Model, options: RunnerOptions, group: Group | None = None) -> "Shard":
        """A pool for a loaded model, of the same size in all ranks; dtype and device of the options are not read."""
        place, kv_dtype = model.place, model.kv_place.dtype
        block_bytes = sum(layer.block_bytes(options.block_size, kv_dtype) for layer in model.kv_layers.values())
        pool_bytes = _pool_bytes(model, options) if options.kv_cache_memory is None else options.kv_cache_memory
        if group is not None:
            pool_bytes = group.least(pool_bytes)
        num_state_slots = _num_state_slots(model, pool_bytes, options.max_num_seqs)
        pool_bytes -= num_state_slots * model.state_bytes
        num_blocks = pool_bytes // block_bytes
        if num_blocks <= 0:
            raise UsageError(
                f"{max(pool_bytes, 0)} bytes for keys and values hold no block of {options.block_size} tokens "
                f"({block_bytes} bytes); raise --kv-cache-memory"
            )
        # A graph would write its states into the slots of the step that it was recorded with; ranks are not in step.
        may_have_graphs = model.attention.supports_graphs and not num_state_slots and group is None
        has_graphs = place.is_cuda and not options.reads and may_have_graphs and not options.enforce_eager
        cache = model.make_cache(num_blocks + has_graphs, options.block_size, num_state_slots)
        swap_space = options.swap_space
        if swap_space is None:
            # On a CPU too: copying a block costs far less than computing it, and memory is taken when it is used.
            swap_space = min(_SWAP_AT_MOST // options.num_ranks, pool_bytes)
        queues, graphs = queues_of(place.device), None
        if has_graphs:
            forward = partial(model.forward_planned, cache)
            graphs = StepGraphs(forward, CudaRecorder(), scratch_slot=num_blocks * options.block_size)
        host = HostPool(cache, swap_space // block_bytes, queues, descriptor=options.swap_descriptor)
        halves = model.halves() if options.reads else None
        return cls(model, cache, host, num_blocks=num_blocks, queues=queues, graphs=graphs, halves=halves)

    def copy_out(self, out: SwapOut) -> None:
        self.host.copy_out(out.blocks, out.host_slots)

    def copy_in(self, back: SwapIn) -> None:
        self.host.copy_in(back.host_slots, back.blocks)

    def logits(self, step: ForwardBatch) -> Tensor:
        return self.model.forward(step, self.cache)

    @property
    def finds_likeliest(self) -> bool:
        return self.model.greedy_head is not None

    def likeliest(self, step: ForwardBatch) -> tuple[Tensor, Tensor]:
        """The largest logits, [num_sampled], and their tokens, int64 [num_sampled]; writes the step's keys and values.

        Only where it `finds_likeliest`.
        """
        return self.model.likeliest(step, self.cache)

    def hidden(self, step: ForwardBatch) -> Tensor:
        return self._two_halves.hidden(step, self.cache, self.cache.attention.plan(step.work))

    def head(
        self,
        hidden: Tensor,  # [num, hidden_size]
    ) -> Tensor:
        return self._two_halves.logits(hidden)

    def close(self) -> None:
        """Nothing was started for it."""

    @property
    def _two_halves(self) -> Halves:
        assert self._halves is not None, "rows are read by a shard that was not laid out for it"
        return self._halves


def _pool_bytes(model: Model, options: RunnerOptions) -> int:
    device = model.place.device
    if device.type != "cuda":
        return cpu_pool_bytes() // (options.num_ranks * options.num_sharing)
    workspace = measure_workspace(
        model, options.max_num_batched_tokens, options.max_num_seqs, options.block_size, CudaMeter(device)
    )
    return gpu_pool_bytes(device, gpu_memory_utilization=options.gpu_memory_utilization, workspace_bytes=workspace)


def _num_state_slots(model: Model, pool_bytes: int, max_num_seqs: int) -> int:
    """One for each row that runs, as far as half of the memory goes."""
    if not model.state_bytes:
        return 0
    return max(1, min(max_num_seqs, pool_bytes // 2 // model.state_bytes))
