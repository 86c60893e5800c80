"""A causal language model from transformers, unmodified, run packed over the block pool.

Owns the weights and the proof, at load, that this way of running them computes what the model's own code does. The
device's own kernels take part, where there are any and the same proof holds with them.
"""

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from batchrun.engine.attention import NAME, paged_attention, run_packed
from batchrun.engine.batch import ForwardBatch
from batchrun.engine.fusion import fuse, round_weights, rounded_rows
from batchrun.engine.greedy_head import GreedyHead
from batchrun.engine.group import own_share
from batchrun.engine.head import Halves
from batchrun.engine.invariance import prove_invariance
from batchrun.engine.kv_cache import KVCache
from batchrun.engine.memory import trim_heap
from batchrun.engine.self_check import Checked, Expected, check, check_halves, expect
from batchrun.engine.state_layers import pack_state_layers, states_like
from batchrun.engine.state_pool import StatePool, state_bytes
from batchrun.errors import ModelUnavailable
from batchrun.model_spec import STATE_LAYERS
from batchrun.quiet import quiet_transformers
from batchrun_kernels import Attention, Feature, KVLayer, UnsupportedError, check_kv_dtype, native, select
from batchrun_kernels.cpu import GatherAttention
from batchrun_kernels.layers import LayerKernels, Quantization, layer_kernels

if TYPE_CHECKING:
    from pathlib import Path

_KNOWN_LAYERS = frozenset({"full_attention", "sliding_attention"}) | STATE_LAYERS
_log = logging.getLogger(__name__)


class Model:
    """`forward` on the device and in the dtype it was loaded with.

    `kv_layers` is what a pool must hold for it, `attention` what it was checked with, which is to read that pool.
    `place` is a tensor of the model's dtype on its device, `kv_place` one of the dtype of keys and values. With a
    `greedy_head` it finds likeliest tokens without logits.
    """

    def __init__(
        self,
        module: Any,
        kv_layers: dict[int, KVLayer],
        needs: frozenset[Feature],
        attention: Attention,
        place: Tensor,
        kv_place: Tensor,
        greedy_head: GreedyHead | None,
    ) -> None:
        self.kv_layers = kv_layers
        self.needs = needs
        self.attention = attention
        self.place = place
        self.kv_place = kv_place
        self.greedy_head = greedy_head
        self._module = module
        self._states_like = states_like(module)

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's state; 0 where sequences have none."""
        return state_bytes(self._states_like)

    def make_cache(self, num_blocks: int, block_size: int, num_state_slots: int) -> KVCache:
        """A pool for the model's keys and values, and for the states of so many sequences if they have any."""
        states = StatePool(num_state_slots, self._states_like) if self._states_like else None
        cache = KVCache(num_blocks, block_size, self.attention, self.kv_place, states)
        for index, layer in self.kv_layers.items():
            cache.allocate(index, layer)
        return cache

    def halves(self) -> Halves:
        """Layers and head apart; raises ModelUnavailable when that is not the same as the whole."""
        halves = Halves(self._module)
        check_halves(self._module, halves, self.attention, self.kv_place)
        return halves

    @classmethod
    def load(
        cls,
        folder: "Path",
        *,
        dtype: torch.dtype,
        device: torch.device,
        trust_remote_code: bool,
        kv_dtype: torch.dtype | None = None,
        quantization: Quantization = "none",
        is_deterministic: bool = False,
        num_ranks: int = 1,
    ) -> "Model":
        """Reads safetensors weights and checks the model against its own eager attention.

        Of `num_ranks` above 1 all load the model at the same time, each its share of the weights and heads; all compute
        together from then on.

        Raises ModelUnavailable naming the architecture when it cannot be run exactly, when keys and values cannot be
        kept in `kv_dtype` (None: in `dtype`), when weights cannot be quantized so, or when it should be but is not
        deterministic.
        """
        from transformers import AutoModelForCausalLM
        from transformers.distributed.configuration_utils import DistributedConfig

        divided: dict[str, Any] = {}
        if num_ranks > 1:
            divided["distributed_config"] = DistributedConfig(tp_size=num_ranks, tp_plan="auto")
        try:
            with quiet_transformers():
                module: Any = AutoModelForCausalLM.from_pretrained(
                    folder,
                    dtype=dtype,
                    attn_implementation="eager",
                    use_safetensors=True,
                    trust_remote_code=trust_remote_code,
                    **divided,
                )
        except (OSError, ValueError, KeyError, ImportError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ModelUnavailable(f"{folder} cannot be loaded: {reason}") from error
        module = module.to(device)
        if num_ranks > 1:
            _log.info("%d ranks, each with %.0f %% of the weights", num_ranks, 100 * own_share(module))
        model = cls.adopt(module, kv_dtype, quantization, is_deterministic=is_deterministic, is_divided=num_ranks > 1)
        trim_heap()
        return model

    @classmethod
    def adopt(
        cls,
        module: Any,
        kv_dtype: torch.dtype | None = None,
        quantization: Quantization = "none",
        *,
        is_deterministic: bool = False,
        is_divided: bool = False,
    ) -> "Model":
        """Takes over a transformers model that runs eager attention; see `load`.

        Quantized, it is compared with what its own code computes from rounded weights and rows. The modules of a
        divided one stay as they are: what they sum up over the ranks is not in the formulas that kernels know.
        """
        from transformers import AttentionInterface

        _refuse_by_name(module.config)
        module.eval()
        AttentionInterface.register(NAME, paged_attention)
        weight = module.get_input_embeddings().weight
        place = torch.empty(0, dtype=weight.dtype, device=weight.device)
        try:
            kernels = None if is_divided else layer_kernels(place.device, place.dtype, quantization)
        except UnsupportedError as error:
            raise ModelUnavailable(f"{error}; leave out --quantization") from error
        is_plain = kernels is None and place.device.type == "cpu" and place.dtype == torch.float32
        if is_plain and (problem := native.problem()) is not None:
            _log.warning("%s", problem)
        if kernels is not None and kernels.rounds:
            round_weights(module, kernels)
        with quiet_transformers():  # which calls its own convolutions slow
            expected = expect(module)
            expected_fast = _expect_rounded(module, kernels) if kernels is not None and kernels.rounds else expected
            has_states = pack_state_layers(module, expected.name)
        if has_states and is_deterministic:
            raise ModelUnavailable(
                f"{expected.name} keeps states, for which --deterministic is not proven; leave it out"
            )
        with quiet_transformers():
            module.set_attn_implementation(NAME)
        if module.config._attn_implementation != NAME:
            # ALiBi, a mask or a product of its own: transformers warns, and leaves such a model as it was.
            raise ModelUnavailable(f"{expected.name} computes attention in its own code, which cannot run over blocks")
        checked = check(module, expected, GatherAttention(place.device))
        attention, checked = _accelerate(module, expected_fast, checked, kernels)
        kv_place = place.new_empty(0, dtype=kv_dtype)
        try:
            check_kv_dtype(attention, place.dtype, kv_place.dtype)
        except UnsupportedError as error:
            raise ModelUnavailable(f"{error}; leave out --kv-cache-dtype") from error
        if kv_place.dtype != place.dtype:
            check(module, expected_fast, attention, kv_place, rounds=kernels is not None and kernels.rounds)
        if is_deterministic:
            prove_invariance(module, expected, attention, kv_place)
        greedy_head = GreedyHead.find(module) if checked.ends_with_head else None
        return cls(module, checked.kv_layers, checked.needs, attention, place, kv_place, greedy_head)

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Logits [num_sampled, vocab]; writes the batch's keys and values to the cache on the way."""
        return self.forward_planned(cache, batch, cache.attention.plan(batch.work))

    def likeliest(self, batch: ForwardBatch, cache: KVCache) -> tuple[Tensor, Tensor]:
        """The largest of the logits that `forward` gives, [num_sampled], and its token, int64 [num_sampled]."""
        assert self.greedy_head is not None, "the model finds no tokens without logits"
        return self.greedy_head.likeliest(batch, cache, cache.attention.plan(batch.work))

    def forward_planned(self, cache: KVCache, batch: ForwardBatch, plan: Any) -> Tensor:
        """The same with the attention's plan for the batch, which may be made beforehand."""
        return run_packed(self._module, batch, cache, plan)


def _expect_rounded(module: Any, kernels: LayerKernels) -> Expected:
    """What its own code computes when the rows that its weights are multiplied with are rounded as the kernels do."""
    with rounded_rows(module, kernels):
        return expect(module)


def _accelerate(
    module: Any, expected: Expected, checked: Checked, kernels: LayerKernels | None
) -> tuple[Attention, Checked]:
    """Puts the device's kernels into the module, if the model is as right with them; its attention and its check."""
    place, plain = expected.place, GatherAttention(expected.place.device)
    try:
        attention = select(str(place.device), checked.needs, checked.kv_layers.values(), place.dtype)
    except UnsupportedError as error:
        raise ModelUnavailable(str(error)) from error
    fusion = fuse(module, kernels) if kernels is not None else None
    if fusion is None and attention.name == plain.name:
        return attention, checked
    try:
        return attention, check(module, expected, attention, rounds=kernels is not None and kernels.rounds)
    except ModelUnavailable as error:
        _log.warning("running in plain torch, which is slower: with the fast kernels %s", error)
        if fusion is not None:
            fusion.undo()
        return plain, checked


def _refuse_by_name(config: Any) -> None:
    name = (config.architectures or [type(config).__name__])[0]
    text = config.get_text_config(decoder=True)
    unknown = set(getattr(text, "layer_types", None) or ()) - _KNOWN_LAYERS
    if unknown:
        raise ModelUnavailable(f"{name} has layers of type {', '.join(sorted(unknown))}, which cannot be run")
