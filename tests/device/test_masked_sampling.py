"""What a grammar does not allow is out before anything else is done to the logits."""

import math

import numpy as np
import pytest
import torch

from batchrun.engine.allowed import AllowedTokens
from batchrun.engine.request import SamplingParams
from batchrun.engine.sampling import sample, unpacked
from tests.device.steps import make_sequence, next_item

VOCAB = 1201  # no multiple of a word


def bits_of(*rows: set[int]) -> np.ndarray:
    bits = np.zeros((len(rows), -(-VOCAB // 32) * 32), np.uint8)
    for row, tokens in zip(bits, rows, strict=True):
        row[list(tokens)] = 1
    return np.packbits(bits, axis=1, bitorder="little").view(np.int32)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=0.7, seed=3),
        SamplingParams(temperature=2.0, top_k=2),
        SamplingParams(temperature=1.0, top_p=0.3),
        SamplingParams(temperature=1.0, min_p=0.9),
        SamplingParams(repetition_penalty=1.3, presence_penalty=-2.0),
    ],
)
@pytest.mark.parametrize("constrained", [(0, 1, 2, 3, 4), (1, 4), (3,)])
def test_a_row_chooses_as_if_there_were_no_other_tokens(sampling: SamplingParams, constrained: tuple[int, ...]) -> None:
    rng = np.random.default_rng(5)
    logits = torch.from_numpy(rng.normal(0, 3, (5, VOCAB)).astype(np.float32))
    logits[:, 7] = 60.0  # the likeliest by far, and never allowed
    items = tuple(next_item(make_sequence(row, [7, 8, 30 + row], [], sampling), 99) for row in range(5))
    sets = [
        set(map(int, rng.choice(np.arange(8, VOCAB), 40, replace=False))) | {0, 31, 32, VOCAB - 1} for _ in range(5)
    ]
    barred = logits.clone()
    for row in constrained:
        barred[row, [token for token in range(VOCAB) if token not in sets[row]]] = -math.inf
    allowed = AllowedTokens(np.array(constrained), bits_of(*(sets[row] for row in constrained)))
    chosen = sample(logits.clone(), items, (2,), allowed).tolist()
    assert chosen == sample(barred, items, (2,)).tolist()
    assert all(chosen[row] in sets[row] for row in constrained)
    free = [row for row in range(5) if row not in constrained]
    assert [chosen[row] for row in free] == [sample(logits.clone(), items, (2,)).tolist()[row] for row in free]


def test_bits_are_unpacked_alike_on_every_device() -> None:
    packed = np.random.default_rng(3).integers(0, 256, (5, 77), dtype=np.uint8)
    expected = np.unpackbits(packed, axis=1, bitorder="little")
    assert np.array_equal(unpacked(torch.from_numpy(packed)).numpy(), expected)
