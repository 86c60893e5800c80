"""Carries out the scheduler's steps with a model's tensors: swap, pack, forward, sample."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from batchrun.engine.allowed import allowed_tokens
from batchrun.engine.batch import Samples, pack
from batchrun.engine.graphs import CudaRecorder, StepGraphs
from batchrun.engine.head import Halves
from batchrun.engine.invariance import require_fixed_kernels
from batchrun.engine.kv_cache import KVCache
from batchrun.engine.logprobs import Logprobs, joined, logprobs_of
from batchrun.engine.memory import cpu_pool_bytes, gpu_pool_bytes, is_out_of_memory
from batchrun.engine.model import Model
from batchrun.engine.queues import Event, Queues, queues_of, to_host
from batchrun.engine.reading import Read, Reading, read
from batchrun.engine.runner_facts import RunnerFacts
from batchrun.engine.sampling import sample
from batchrun.engine.step import Launched, Sampled, ScheduledBatch
from batchrun.engine.swap import HostPool
from batchrun.engine.workspace import CudaMeter, measure_workspace
from batchrun.errors import EngineFailed, ModelUnavailable, UsageError
from batchrun_kernels.layers import Quantization

if TYPE_CHECKING:
    from batchrun.checkpoint import Checkpoint

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
KVDTypeName = Literal["auto", "float16", "float32"]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SWAP_AT_MOST = 4 << 30
# Up to so many rows a product on a CPU takes about as long as reading its weights does.
_FREE_ON_CPU = 8
_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """How a runner is laid out; sizes in bytes, None: chosen from the memory there is.

    Rows are read where it `reads`, and continued otherwise. A step will have at most `max_num_batched_tokens` tokens of
    `max_num_seqs` rows; a GPU keeps room for such a one. Of a model with states so many rows have one, as far as these
    take half of `kv_cache_memory` at most. Where that is chosen, `num_sharing` processes divide the host's memory.
    """

    dtype: DTypeName = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    block_size: int = 16
    quantization: Quantization = "none"
    kv_cache_dtype: KVDTypeName = "auto"
    kv_cache_memory: int | None = None
    gpu_memory_utilization: float = 0.9
    swap_space: int | None = None
    enforce_eager: bool = False
    deterministic: bool = False
    trust_remote_code: bool = False
    reads: bool = False
    num_sharing: int = 1


class TorchRunner:
    """`step.Runner` over a transformers model and a pool of blocks.

    A step that does not fit the device's memory is computed in halves, and again in halves.
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        host: HostPool,
        eos_token_ids: tuple[int, ...],
        *,
        num_blocks: int,
        queues: Queues,
        graphs: StepGraphs | None = None,
        halves: Halves | None = None,
    ) -> None:
        """`num_blocks` of the cache's are for sequences; `graphs`, if any, know what the rest is for. Without the
        `halves` of the model no row can be read."""
        self._model = model
        self._cache = cache
        self._host = host
        self._eos_token_ids = eos_token_ids
        self._queues = queues
        self._graphs = graphs
        self._last: Samples | None = None
        self._halves = halves
        self.block_size = cache.block_size
        self.num_blocks = num_blocks
        self.num_host_slots = host.num_slots
        self.num_state_slots = cache.states.num_slots if cache.states is not None else 0
        self.block_bytes = cache.block_bytes
        self.is_gpu = self.overlaps = model.place.is_cuda
        self.num_free_tokens = 0 if self.overlaps or self.num_state_slots else _FREE_ON_CPU

    @classmethod
    def build(cls, checkpoint: "Checkpoint", options: RunnerOptions) -> "TorchRunner":
        """Loads the weights and lays out the pool.

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
                kv_dtype=_DTYPES.get(options.kv_cache_dtype, dtype),
                quantization=options.quantization,
                is_deterministic=options.deterministic,
            )
        except torch.OutOfMemoryError as error:
            raise ModelUnavailable(f"{checkpoint.spec.name} does not fit the memory of {device}") from error
        try:
            return cls.lay_out(model, options, checkpoint.spec.eos_token_ids)
        except torch.OutOfMemoryError as error:
            remedy = "--kv-cache-memory" if options.kv_cache_memory is not None else "--max-num-batched-tokens"
            raise UsageError(f"{device} has not the memory for keys, values and a step; lower {remedy}") from error

    @classmethod
    def lay_out(cls, model: Model, options: RunnerOptions, eos_token_ids: tuple[int, ...]) -> "TorchRunner":
        """A runner for a loaded model; dtype and device of the options are not read."""
        place, kv_dtype = model.place, model.kv_place.dtype
        block_bytes = sum(layer.block_bytes(options.block_size, kv_dtype) for layer in model.kv_layers.values())
        pool_bytes = _pool_bytes(model, options) if options.kv_cache_memory is None else options.kv_cache_memory
        num_state_slots = _num_state_slots(model, pool_bytes, options.max_num_seqs)
        pool_bytes -= num_state_slots * model.state_bytes
        num_blocks = pool_bytes // block_bytes
        if num_blocks <= 0:
            raise UsageError(
                f"{max(pool_bytes, 0)} bytes for keys and values hold no block of {options.block_size} tokens "
                f"({block_bytes} bytes); raise --kv-cache-memory"
            )
        # A graph would write its states into the slots of the step that it was recorded with.
        may_have_graphs = model.attention.supports_graphs and not num_state_slots
        has_graphs = place.is_cuda and not options.reads and may_have_graphs and not options.enforce_eager
        cache = model.make_cache(num_blocks + has_graphs, options.block_size, num_state_slots)
        swap_space = options.swap_space
        if swap_space is None:
            # On a CPU too: copying a block costs far less than computing it, and memory is taken when it is used.
            swap_space = min(_SWAP_AT_MOST, pool_bytes)
        queues, graphs = queues_of(place.device), None
        if has_graphs:
            forward = partial(model.forward_planned, cache)
            graphs = StepGraphs(forward, CudaRecorder(), scratch_slot=num_blocks * options.block_size)
        host = HostPool(cache, swap_space // block_bytes, queues)
        halves = model.halves() if options.reads else None
        runner = cls(
            model, cache, host, eos_token_ids, num_blocks=num_blocks, queues=queues, graphs=graphs, halves=halves
        )
        facts = runner.facts
        _log.info(
            "%s, %s, %s attention; %s",
            facts.device,
            facts.dtype,
            facts.kernel,
            facts.memory,
        )
        return runner

    @property
    def facts(self) -> RunnerFacts:
        place = self._model.place
        return RunnerFacts(
            device=str(place.device),
            dtype=str(place.dtype).removeprefix("torch."),
            kv_dtype=str(self._model.kv_place.dtype).removeprefix("torch."),
            kernel=self._cache.attention.name,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            pool_bytes=self.num_blocks * self.block_bytes,
            num_state_slots=self.num_state_slots,
            state_bytes=self.num_state_slots * self._model.state_bytes,
            host_bytes=self.num_host_slots * self.block_bytes,
        )

    @property
    def num_graphs(self) -> int:
        """Steps that are recorded as device graphs."""
        return self._graphs.num_recorded if self._graphs is not None else 0

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> Launched:
        """Raises EngineFailed when not even a single token fits the device's memory."""
        for out in batch.swap_outs:
            self._host.copy_out(out.blocks, out.host_slots)
        for back in batch.swap_ins:
            self._host.copy_in(back.host_slots, back.blocks)
        if batch.reads:
            return self._launch_reading(batch)
        nothing = _Chosen(self._model.place.new_empty(0, dtype=torch.int64))
        # All rows of a job ask for them or none does; with beams some may ask for more.
        asked = [item.sequence.request.num_logprobs for item in batch.items]
        num_top = max((num for num in asked if num is not None), default=None)
        parts = self._split(batch, partial(self._sample, num_top)) if batch.items else [nothing]
        tokens = torch.cat([part.tokens for part in parts])
        logprobs = [part.logprobs.on_host() for part in parts if part.logprobs is not None]
        self._last = Samples(tokens, {item.sequence: place for place, item in enumerate(batch.sampled)})
        on_host = to_host(tokens)
        ended = self._queues.compute.record()
        return _Computing(on_host, logprobs, ended, self._host, was_split=len(parts) > 1)

    def _launch_reading(self, batch: ScheduledBatch) -> Launched:
        parts = self._split(batch, self._read)
        on_host = tuple(Read(part.items, to_host(part.readings)) for part in parts)
        return Reading(batch, on_host, self._queues.compute.record(), self._host)

    def _sample(self, num_top: int | None, batch: ScheduledBatch) -> "_Chosen":
        """`num_top` likeliest tokens are told of each; None: no log-probability."""
        logits = self._logits(batch)
        # A copy: what is masked for sampling counts all the same.
        raw = logits.clone() if num_top is not None else None
        # A GPU computes the logits meanwhile.
        allowed = allowed_tokens(batch, self._eos_token_ids)
        tokens = sample(logits, batch.sampled, self._eos_token_ids, allowed)
        return _Chosen(tokens, None if raw is None or num_top is None else logprobs_of(raw, tokens, num_top))

    def _read(self, batch: ScheduledBatch) -> Read:
        assert self._halves is not None, "rows are read by a runner that was not laid out for it"
        forward = pack(batch, self.block_size, self._model.place.device)
        hidden = self._halves.hidden(forward, self._cache, self._cache.attention.plan(forward.work))
        return Read(batch.items, read(hidden, batch.items, self._halves.logits))

    def _split(self, batch: ScheduledBatch, compute: Callable[[ScheduledBatch], _Result]) -> list[_Result]:
        """What `compute` makes of the step; more than one: the step was split, for lack of memory."""
        self._cache.commit()
        try:
            return [compute(batch)]
        except (MemoryError, RuntimeError) as error:
            self._cache.discard()
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
        padding = self._graphs.padding(batch) if self._graphs is not None else None
        forward = pack(batch, self.block_size, self._model.place.device, last=self._last, padding=padding)
        plan = self._cache.attention.plan(forward.work)
        if self._graphs is None or padding is None:
            return self._model.forward_planned(self._cache, forward, plan)
        return self._graphs.run(forward, plan)[: len(batch.sampled)]


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


def _pool_bytes(model: Model, options: RunnerOptions) -> int:
    device = model.place.device
    if device.type != "cuda":
        return cpu_pool_bytes() // options.num_sharing
    workspace = measure_workspace(
        model, options.max_num_batched_tokens, options.max_num_seqs, options.block_size, CudaMeter(device)
    )
    return gpu_pool_bytes(device, gpu_memory_utilization=options.gpu_memory_utilization, workspace_bytes=workspace)


def _num_state_slots(model: Model, pool_bytes: int, max_num_seqs: int) -> int:
    """One for each row that runs, as far as half of the memory goes."""
    if not model.state_bytes:
        return 0
    return max(1, min(max_num_seqs, pool_bytes // 2 // model.state_bytes))


def choose_device(name: str) -> torch.device:
    """The device meant by "auto", "cpu" or "cuda"; raises ModelUnavailable when there is no such one."""
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise ModelUnavailable("no usable CUDA device; use --device cpu, or install a CUDA build of torch")
    return torch.device("cuda" if has_gpu and name != "cpu" else "cpu")


def use_gpu(index: int) -> None:
    """Has this process compute on one of the GPUs that it sees. Raises UsageError when there are not so many."""
    num = torch.cuda.device_count()
    if index >= num:
        raise UsageError(f"{index + 1} workers or more need as many GPUs, but there are {num}; lower --workers")
    torch.cuda.set_device(index)


def choose_dtype(name: DTypeName, device: torch.device) -> torch.dtype:
    """The dtype of weights, keys and values.

    Auto is float32 on a CPU, where the others are emulated; bfloat16 on a GPU that has it, float16 on an older one.
    """
    if name != "auto":
        return _DTYPES[name]
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
