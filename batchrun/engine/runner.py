"""Carries out the scheduler's steps with a model's tensors: swap, pack, forward, sample."""

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from batchrun.engine.batch import pack
from batchrun.engine.kv_cache import KVCache
from batchrun.engine.memory import default_pool_bytes
from batchrun.engine.model import Model
from batchrun.engine.sampling import sample
from batchrun.engine.step import Sampled, ScheduledBatch
from batchrun.engine.swap import HostPool
from batchrun.errors import ModelUnavailable, UsageError

if TYPE_CHECKING:
    from batchrun.checkpoint import Checkpoint

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
KVDTypeName = Literal["auto", "float16", "float32"]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SWAP_AT_MOST = 4 << 30
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """How a runner is laid out; sizes in bytes, None: chosen from the memory there is."""

    dtype: DTypeName = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    block_size: int = 16
    kv_cache_dtype: KVDTypeName = "auto"
    kv_cache_memory: int | None = None
    gpu_memory_utilization: float = 0.9
    swap_space: int | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True, slots=True)
class RunnerFacts:
    """What a runner turned out to be."""

    device: str
    dtype: str
    kv_dtype: str
    kernel: str
    num_blocks: int
    block_size: int
    pool_bytes: int
    host_bytes: int


class TorchRunner:
    """`step.Runner` over a transformers model and a pool of blocks."""

    def __init__(self, model: Model, cache: KVCache, host: HostPool, eos_token_ids: tuple[int, ...]) -> None:
        self._model = model
        self._cache = cache
        self._host = host
        self._eos_token_ids = eos_token_ids
        self.block_size = cache.block_size
        self.num_blocks = cache.num_blocks
        self.num_host_slots = host.num_slots
        self.block_bytes = cache.block_bytes
        self.is_gpu = model.place.is_cuda

    @classmethod
    def build(cls, checkpoint: "Checkpoint", options: RunnerOptions) -> "TorchRunner":
        """Loads the weights and lays out the pool.

        Raises ModelUnavailable when the model or the device cannot be used, UsageError when the memory given
        holds not a single block.
        """
        assert checkpoint.folder is not None, "a checkpoint without files has no tensors"
        device = choose_device(options.device)
        dtype = choose_dtype(options.dtype, device)
        model = Model.load(
            checkpoint.folder,
            dtype=dtype,
            device=device,
            trust_remote_code=options.trust_remote_code,
            kv_dtype=_DTYPES.get(options.kv_cache_dtype, dtype),
        )
        return cls.lay_out(model, options, checkpoint.spec.eos_token_ids)

    @classmethod
    def lay_out(cls, model: Model, options: RunnerOptions, eos_token_ids: tuple[int, ...]) -> "TorchRunner":
        """A runner for a loaded model; dtype and device of the options are not read."""
        place, kv_dtype = model.place, model.kv_place.dtype
        block_bytes = sum(layer.block_bytes(options.block_size, kv_dtype) for layer in model.kv_layers.values())
        pool_bytes = options.kv_cache_memory
        if pool_bytes is None:
            pool_bytes = default_pool_bytes(place.device, gpu_memory_utilization=options.gpu_memory_utilization)
        num_blocks = pool_bytes // block_bytes
        if num_blocks == 0:
            raise UsageError(
                f"{pool_bytes} bytes for keys and values hold no block of {options.block_size} tokens "
                f"({block_bytes} bytes); raise --kv-cache-memory"
            )
        cache = KVCache(num_blocks, options.block_size, model.attention, model.kv_place)
        for index, layer in model.kv_layers.items():
            cache.allocate(index, layer)
        swap_space = options.swap_space
        if swap_space is None:
            # On a CPU too: copying a block costs far less than computing it, and memory is taken when it is used.
            swap_space = min(_SWAP_AT_MOST, pool_bytes)
        runner = cls(model, cache, HostPool(cache, swap_space // block_bytes), eos_token_ids)
        facts = runner.facts
        _log.info(
            "%s, %s, %s attention; %d blocks of %d tokens for keys and values in %s (%.2f GiB)",
            facts.device,
            facts.dtype,
            facts.kernel,
            facts.num_blocks,
            facts.block_size,
            facts.kv_dtype,
            facts.pool_bytes / (1 << 30),
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
            host_bytes=self.num_host_slots * self.block_bytes,
        )

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> Sampled:
        """Returns when the sampled tokens are on the host. Raises EngineFailed when logits are not finite."""
        moves = [self._host.copy_out(swap.blocks, swap.host_slots) for swap in batch.swap_outs]
        moves += [self._host.copy_in(swap.host_slots, swap.blocks) for swap in batch.swap_ins]
        forward = pack(batch, self.block_size, self._model.place.device)
        logits = self._model.forward(forward, self._cache)
        tokens = sample(logits, [item.sequence for item in batch.sampled], self._eos_token_ids)
        return Sampled(
            tokens=tokens,
            swap_bytes=sum(move.num_bytes for move in moves),
            swap_seconds=sum(move.seconds for move in moves),
        )


def choose_device(name: str) -> torch.device:
    """The device meant by "auto", "cpu" or "cuda"; raises ModelUnavailable when there is no such one."""
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise ModelUnavailable("no usable CUDA device; use --device cpu, or install a CUDA build of torch")
    return torch.device("cuda" if has_gpu and name != "cpu" else "cpu")


def choose_dtype(name: DTypeName, device: torch.device) -> torch.dtype:
    """The dtype of weights, keys and values.

    Auto is float32 on a CPU, where the others are emulated; bfloat16 on a GPU that has it, float16 on an older one.
    """
    if name != "auto":
        return _DTYPES[name]
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
