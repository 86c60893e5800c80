"""The proof, at load, that a model run packed over blocks computes what its own eager attention computes.

Three short sequences, cut into chunks and packed through a small pool of shuffled blocks, and states where the model
has them, against plain calls.
It covers families nobody has heard of; what it cannot see because the sequences are short (a window) is compared
with the configuration instead.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from batchrun.engine.attention import run_packed
from batchrun.engine.batch import pack
from batchrun.engine.greedy_head import head_outputs
from batchrun.engine.head import Halves
from batchrun.engine.kv_cache import KVCache
from batchrun.engine.request import Request, SamplingParams
from batchrun.engine.sequence import Sequence
from batchrun.engine.state_layers import make_states
from batchrun.engine.step import Item, ScheduledBatch
from batchrun.errors import ModelUnavailable
from batchrun.model_spec import STATE_LAYERS
from batchrun_kernels import Attention, Feature, KVLayer, Mask

_BLOCK_SIZE = 4
# (first chunk, length) of each sequence.
_CHUNKS = ((4, 6), (5, 11), (11, 17))
# Measured on tiny random models: in float32 the worst position of 13 families is at 1.6e-6. In bfloat16 the median
# position of ten dense families is at 1.2e-2 or less, the worst one at 4.5e-2; there the median counts, because
# rounding may choose another expert for a token. What moves few positions is therefore not seen in half precision
# (a dropped window: median 2.2e-2), nor, in either, what moves the logits too little (a softcap over small scores).
_TOLERANCE_FLOAT32 = 1e-3
_TOLERANCE_HALF = 0.05


@dataclass(frozen=True, slots=True)
class Checked:
    """What the check saw: layers that store keys and values, and what their attention must be able to do."""

    kv_layers: dict[int, KVLayer]
    needs: frozenset[Feature]
    ends_with_head: bool  # the logits are what the model's head gives, to the bit


@dataclass(frozen=True, slots=True)
class Expected:
    """What the model's own code computes for each of the sequences."""

    name: str
    vocab_size: int
    place: Tensor  # of the model's dtype on its device
    logits: tuple[Tensor, ...]  # [length, vocab] each


@torch.inference_mode()
def expect(module: Any) -> Expected:
    """Asks a transformers model that computes eager attention; `module` is not changed."""
    weight = module.get_input_embeddings().weight
    vocab_size, place = weight.shape[0], torch.empty(0, dtype=weight.dtype, device=weight.device)
    logits = _plain_logits(module, _sequences(vocab_size), place)
    name = (module.config.architectures or [type(module).__name__])[0]
    return Expected(name, vocab_size, place, logits)


@torch.inference_mode()
def check(
    module: Any, expected: Expected, attention: Attention, kv_place: Tensor | None = None, *, rounds: bool = False
) -> Checked:
    """`module` computes "batchrun" attention, which is done by `attention`, and should give what was expected.

    Keys and values are kept as `kv_place` is, of the model's dtype where it is None. With `rounds`, what its weights
    are multiplied with is rounded to fewer bits than it has.

    Raises ModelUnavailable, naming the architecture, when the two differ or the packed call fails.
    """
    name = expected.name
    kv_place = expected.place if kv_place is None else kv_place
    try:
        with head_outputs(module) as outputs:
            steps, cache = _packed_logits(module, _sequences(expected.vocab_size), attention, kv_place)
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelUnavailable(f"{name} cannot be run over blocks: {reason}") from error
    _check_windows(name, module.config.get_text_config(decoder=True), cache.masks)
    is_exact = expected.place.dtype == kv_place.dtype == torch.float32 and not rounds
    alone = list(zip(expected.logits, _CHUNKS, strict=True))
    read = [logits[_num_unread(cut) : cut] for logits, (cut, _) in alone] + [logits[cut:] for logits, (cut, _) in alone]
    _check_logits(name, torch.cat(steps), torch.cat(read), is_exact)
    needs = frozenset[Feature]().union(*(mask.features for mask in cache.masks))
    ends_with_head = len(outputs) == len(steps) and all(map(_is_same, outputs, steps))
    return Checked(cache.layers, needs, ends_with_head)


@torch.inference_mode()
def check_halves(module: Any, halves: Halves, attention: Attention, kv_place: Tensor) -> None:
    """Layers and head called apart give the logits that the whole model gives. Raises ModelUnavailable."""
    name = (module.config.architectures or [type(module).__name__])[0]
    sequence = _sequences(module.config.get_text_config(decoder=True).vocab_size)[-1]
    states = make_states(module, len(_CHUNKS))
    cache = KVCache(len(sequence.block_table), _BLOCK_SIZE, attention, kv_place, states)
    sequence.block_table = list(range(len(sequence.block_table)))
    item = Item(sequence, 0, sequence.num_tokens, samples=True)
    batch = pack(ScheduledBatch((item,)), _BLOCK_SIZE, kv_place.device)
    batch = replace(batch, sampled=torch.arange(sequence.num_tokens, device=kv_place.device))
    try:
        whole = run_packed(module, batch, cache, attention.plan(batch.work))
        apart = halves.logits(halves.hidden(batch, cache, attention.plan(batch.work)))
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelUnavailable(f"{name} cannot be read without generating: {reason}") from error
    _check_logits(name, apart, whole, is_exact=whole.dtype == torch.float32)


def _sequences(vocab_size: int) -> list[Sequence]:
    sequences = []
    free = list(range(sum(-(-length // _BLOCK_SIZE) for _, length in _CHUNKS)))[::-1]
    for row, (_, length) in enumerate(_CHUNKS):
        ids = (np.arange(length, dtype=np.int32) * 37 + 5 * row + 11) % vocab_size
        sequence = Sequence(Request(row, ids.astype(np.int32), SamplingParams(max_tokens=1)), arrival=row)
        sequence.block_table = [free.pop(row % len(free)) for _ in range(-(-length // _BLOCK_SIZE))]
        sequence.state_slot = len(_CHUNKS) - 1 - row
        sequences.append(sequence)
    return sequences


def _plain_logits(module: Any, sequences: list[Sequence], place: Tensor) -> tuple[Tensor, ...]:
    """[length, vocab] each. What fills up the shorter ones stands behind them, where no token of theirs looks."""
    longest = max(sequence.num_tokens for sequence in sequences)
    ids = np.stack([np.resize(sequence.tokens, longest) for sequence in sequences]).astype(np.int64)
    logits = module(input_ids=torch.from_numpy(ids).to(place.device), use_cache=False).logits
    return tuple(logits[row, : sequence.num_tokens] for row, sequence in enumerate(sequences))


def _packed_logits(
    module: Any, sequences: list[Sequence], attention: Attention, place: Tensor
) -> tuple[list[Tensor], KVCache]:
    """The logits [num_read, vocab] of two steps, sequence after sequence, and the cache they went through.

    Behind the first tokens of the first step nothing is read, as in a job: they count by their keys and values.
    """
    num_blocks = sum(len(sequence.block_table) for sequence in sequences)
    cache = KVCache(num_blocks, _BLOCK_SIZE, attention, place, make_states(module, len(sequences)))
    logits = []
    for late in (False, True):
        spans = [(cut, length - cut) if late else (0, cut) for cut, length in _CHUNKS]
        items = tuple(Item(one, start, num, samples=late) for one, (start, num) in zip(sequences, spans, strict=True))
        batch = pack(ScheduledBatch(items), _BLOCK_SIZE, place.device)
        is_read = [torch.arange(num) >= (0 if late else _num_unread(num)) for _, num in spans]
        batch = replace(batch, sampled=torch.cat(is_read).nonzero()[:, 0].to(place.device))
        logits.append(run_packed(module, batch, cache, attention.plan(batch.work)))
    return logits, cache


def _is_same(
    output: Any,
    logits: Tensor,  # [num_read, vocab]
) -> bool:
    """Whether a head has given these very logits; another type of them, for one, is a step more."""
    is_typed = isinstance(output, Tensor) and output.dtype == logits.dtype
    return is_typed and torch.equal(output, logits[None])


def _num_unread(cut: int) -> int:
    """Of a first chunk."""
    return cut // 2


def _check_windows(name: str, config: Any, masks: list[Mask]) -> None:
    kinds = _attention_layers(config)
    if kinds == []:
        raise ModelUnavailable(f"{name} has no layers that attend; such a model cannot run over blocks")
    if not masks:
        raise ModelUnavailable(f"{name} computes attention in its own code, which cannot run over blocks")
    window = getattr(config, "sliding_window", None)
    expected = [window if kind == "sliding_attention" else None for kind in kinds] if kinds else [window] * len(masks)
    given = [mask.window for mask in masks]
    if given != expected:
        raise ModelUnavailable(
            f"{name} asks its layers for windows {sorted(set(map(str, given)))}, "
            f"its configuration for {sorted(set(map(str, expected)))}"
        )


def _attention_layers(config: Any) -> list[str] | None:
    """The kinds of the layers that attend, in their order; None where the configuration names no kinds."""
    kinds = getattr(config, "layer_types", None)
    return None if kinds is None else [kind for kind in kinds if kind not in STATE_LAYERS]


def _check_logits(
    name: str,
    packed: Tensor,  # [num_tokens, vocab]
    alone: Tensor,  # [num_tokens, vocab]
    is_exact: bool,
) -> None:
    packed, expected = packed.double(), alone.double()
    errors = (packed - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-30)  # [num_tokens]
    error = float(errors.max() if is_exact else errors.median())
    # Written so that NaN fails.
    if not error <= (_TOLERANCE_FLOAT32 if is_exact else _TOLERANCE_HALF):
        raise ModelUnavailable(f"{name} gives different logits over blocks than alone (relative error {error:.1e})")
