"""An argument of transformers' attention call is either translated or refused by name."""

from typing import Any

import pytest
import torch
from torch import nn

from batchrun.engine.attention import paged_attention
from batchrun.engine.batch import ForwardBatch
from batchrun.engine.kv_cache import KVCache
from batchrun.errors import ModelUnavailable
from batchrun_kernels import Mask, Work
from batchrun_kernels.cpu import GatherAttention


class Recorder(GatherAttention):
    def __init__(self) -> None:
        super().__init__()
        self.mask: Mask | None = None

    def attend(self, q: Any, keys: Any, values: Any, plan: Any, mask: Mask) -> torch.Tensor:
        self.mask = mask
        return super().attend(q, keys, values, plan, mask)


def shown(recorder: Recorder) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Keys and values of three tokens that a cache was shown, and the arguments that this adds to an attention's."""
    nothing = torch.empty(0, dtype=torch.int64)
    work = Work((3,), (3,), torch.zeros(1, 1, dtype=torch.int32), 4)
    tokens = torch.arange(3)
    cache = KVCache(1, 4, recorder, torch.empty(0))
    batch = ForwardBatch(tokens[None], tokens[None], tokens, nothing, nothing, nothing, nothing, nothing, work)
    cache.begin(batch, recorder.plan(work))
    added: dict[str, Any] = {}
    return *cache.update(torch.ones(1, 1, 3, 8), torch.ones(1, 1, 3, 8), layer_idx=0, kwargs=added), added


def call(recorder: Recorder, **arguments: Any) -> torch.Tensor:
    key, value, added = shown(recorder)
    q = torch.ones(1, 2, 3, 8)
    out, weights = paged_attention(nn.Linear(1, 1), q, key, value, arguments.pop("mask", None), **added, **arguments)
    assert weights is None
    return out


def test_arguments_are_translated() -> None:
    recorder, sinks = Recorder(), torch.ones(1, 2, 1, 1)
    out = call(recorder, scaling=0.5, sliding_window=2, softcap=3.0, s_aux=sinks, dropout=0.0, position_ids=1)
    assert out.shape == (1, 3, 2, 8)
    assert recorder.mask is not None
    assert (recorder.mask.scale, recorder.mask.window, recorder.mask.softcap) == (0.5, 2, 3.0)
    assert recorder.mask.sinks is not None
    assert recorder.mask.sinks.tolist() == [1.0, 1.0]


def test_no_scaling_means_the_root_of_the_head_dim() -> None:
    recorder = Recorder()
    call(recorder)
    assert recorder.mask == Mask(scale=8**-0.5)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"head_mask": 1}, "head_mask"),
        ({"position_bias": torch.ones(1)}, "position_bias"),
        ({"mask": torch.ones(1)}, "attention_mask"),
        ({"is_causal": False}, "is_causal=False"),
        ({"dropout": 0.1}, "dropout"),
    ],
)
def test_an_argument_without_a_meaning_is_refused_by_name(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelUnavailable, match=f"Linear wants an attention with {named}"):
        call(Recorder(), **arguments)


def attend(key: torch.Tensor, value: torch.Tensor, added: dict[str, Any]) -> torch.Tensor:
    """Of a layer with two heads."""
    return paged_attention(nn.Linear(1, 1), torch.ones(1, 2, 3, 8), key, value, None, **added)[0]


def test_a_layer_may_attend_to_what_an_earlier_one_stored() -> None:
    """Neither the layer's index nor an argument says so, the tensors do."""
    key, value, _ = shown(Recorder())
    for _ in range(2):
        assert torch.equal(attend(key, value, {}), torch.ones(1, 3, 2, 8))


def test_what_is_stored_is_what_a_layer_attends_to_not_what_it_showed() -> None:
    """As where latents are expanded: of other heads and widths."""
    key, value, added = shown(Recorder())
    out = attend(key.repeat(1, 2, 1, 1), value.repeat(1, 2, 1, 2) * 3, added)
    assert torch.equal(out, torch.full((1, 3, 2, 16), 3.0))


def test_keys_and_values_that_are_in_no_pool_are_refused() -> None:
    key, value, added = shown(Recorder())
    for given in ((key * 1, value), (key, value * 1), (key, shown(Recorder())[1])):
        with pytest.raises(ModelUnavailable, match="Linear attends to keys and values that it does not show"):
            attend(*given, {})
    attend(key, value * 1, added)
    for given in ((key, value), (key, value * 2)):
        with pytest.raises(ModelUnavailable, match="Linear attends to other keys and values than it stores"):
            attend(*given, added)


def test_keys_and_values_that_are_not_one_a_token_are_refused() -> None:
    """A model that puts learned ones before them."""
    for extend_values in (False, True):
        key, value, added = shown(Recorder())
        value = value.repeat(1, 1, 2, 1) if extend_values else value
        with pytest.raises(ModelUnavailable, match="Linear attends to other keys and values than it stores"):
            attend(key.repeat(1, 1, 2, 1), value, added)
