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


def written(recorder: Recorder) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of three tokens, in the pool of a layer."""
    nothing = torch.empty(0, dtype=torch.int64)
    work = Work((3,), (3,), torch.zeros(1, 1, dtype=torch.int32), 4)
    tokens = torch.arange(3)
    cache = KVCache(1, 4, recorder, torch.empty(0))
    cache.begin(
        ForwardBatch(tokens[None], tokens[None], tokens, nothing, nothing, nothing, nothing, work), recorder.plan(work)
    )
    return cache.update(torch.ones(1, 1, 3, 8), torch.ones(1, 1, 3, 8), layer_idx=0)


def call(recorder: Recorder, **arguments: Any) -> torch.Tensor:
    key, value = written(recorder)
    q = torch.ones(1, 2, 3, 8)
    out, weights = paged_attention(nn.Linear(1, 1), q, key, value, arguments.pop("mask", None), **arguments)
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


def test_a_layer_may_attend_to_what_an_earlier_one_wrote() -> None:
    recorder = Recorder()
    key, value = written(recorder)
    for _ in range(2):
        out, _ = paged_attention(nn.Linear(1, 1), torch.ones(1, 2, 3, 8), key, value, None)
        assert torch.equal(out, torch.ones(1, 3, 2, 8))


def test_keys_and_values_that_are_in_no_pool_are_refused() -> None:
    """A model that changes them after the cache has seen them; or takes them from two layers."""
    key, value = written(Recorder())
    other = written(Recorder())[1]
    for given in ((key * 1, value), (key, value.repeat(1, 2, 1, 1)), (key, other)):
        with pytest.raises(ModelUnavailable, match="Linear attends to other keys and values than the cache is given"):
            paged_attention(nn.Linear(1, 1), torch.ones(1, 2, 3, 8), *given, None)
