"""Tokens follow from logits by the written rules, and from (seed, row, position) by a hash."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from batchrun.engine.request import Request, SamplingParams
from batchrun.engine.sampling import sample, uniform
from batchrun.engine.sequence import Sequence
from batchrun.engine.step import NO_TOKEN, Item
from tests.device.steps import make_sequence, next_item

VOCAB = 1201
EOS = (2, 5)


# As tokens; 7 and 11 are in the prompt too, which does not count.
BAD_WORDS = ((4,), (11, 6), (3, 4, 5), (9, 8))


def make_row(
    row: int, sampling: SamplingParams, output_ids: tuple[int, ...] = (), bad_words: tuple[tuple[int, ...], ...] = ()
) -> Sequence:
    made = make_sequence(row, [7, 8, 7, 11], [], sampling, output_ids)
    made.request = replace(made.request, bad_words=bad_words)
    return made


def items_of(*sequences: Sequence) -> tuple[Item, ...]:
    return tuple(next_item(sequence, 99) for sequence in sequences)


def obvious(logits: NDArray[np.float64], sequence: Sequence) -> int:
    """One row, one token at a time, in plain Python."""
    params, output = sequence.request.sampling, [int(token) for token in sequence.output_ids]
    scores = logits.astype(np.float64).tolist()
    for token, bias in params.logit_bias:
        scores[token] = float(np.float32(scores[token]) + np.float32(bias))
    for token in set(sequence.tokens.tolist()):
        penalty = params.repetition_penalty
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    for token in set(output):
        scores[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    for word in sequence.request.bad_words:
        if output[len(output) - len(word) + 1 :] == [*word[:-1]] and len(output) >= len(word) - 1:
            scores[word[-1]] = -math.inf
    if len(output) < params.min_tokens:
        for token in (*(() if params.ignore_eos else EOS), *params.stop_token_ids):
            scores[token] = -math.inf
    if params.temperature == 0:
        return int(np.argmax(scores))
    scores = [score / params.temperature for score in scores]
    weights = [math.exp(score - max(scores)) for score in scores]
    kept = [weight if weight >= params.min_p else 0.0 for weight in weights]
    if params.top_k:
        last = sorted(kept, reverse=True)[min(params.top_k, VOCAB) - 1]
        kept = [weight if weight >= last else 0.0 for weight in kept]
    mass, total, last = 0.0, sum(kept), 0.0
    for weight in sorted(kept, reverse=True):
        if mass >= params.top_p * total:
            break
        mass, last = mass + weight, weight
    if params.top_p < 1:
        kept = [weight if weight >= last else 0.0 for weight in kept]
    aim = uniform(params.seed, sequence.request.row_idx, sequence.num_tokens) * sum(kept)
    mass = 0.0
    for token, weight in enumerate(kept):
        mass += weight
        if mass > aim:
            return token
    raise AssertionError("the weights do not reach their own sum")


def random_params(random: np.random.Generator) -> SamplingParams:
    def one(*values: float) -> float:
        return float(random.choice(values))

    return SamplingParams(
        min_tokens=int(one(0, 1, 9)),
        temperature=one(0.0, 0.3, 1.0, 2.5),
        top_p=one(1.0, 0.999999, 0.9, 0.3),
        top_k=int(one(0, 0, 1, 17, 600, 5000)),
        min_p=one(0.0, 0.0, 0.02),
        repetition_penalty=one(1.0, 1.3),
        presence_penalty=one(0.0, 0.7),
        frequency_penalty=one(0.0, -0.4),
        stop_token_ids=(9,),
        logit_bias=((3, one(0.53, -2.47)), (600, one(6.53, 0.0))) if one(0, 1) else (),
        ignore_eos=bool(one(0, 1)),
        seed=int(one(0, 1, 2**40)),
    )


@pytest.mark.parametrize("seed", range(6))
def test_mixed_batch_equals_the_obvious_sampler(seed: int) -> None:
    random = np.random.default_rng(seed)
    outputs = [tuple(random.integers(0, 12, int(random.integers(0, 6))).tolist()) for _ in range(41)]
    rows = [
        make_row(int(random.integers(0, 2**40)), random_params(random), output, BAD_WORDS[: int(random.integers(0, 5))])
        for output in outputs
    ]
    # A flat and a steep half; many ties, so that the border of top_k and top_p falls on them.
    logits = np.round(random.normal(0, 1, (41, VOCAB)) * np.where(np.arange(41) % 2, 1, 5)[:, None], 1)
    logits[:, :12] += 4
    expected = [obvious(one, row) for one, row in zip(logits.astype(np.float32), rows, strict=True)]
    assert sample(torch.from_numpy(logits).float(), items_of(*rows), EOS).tolist() == expected


def test_a_draw_depends_on_the_row_alone() -> None:
    sampling = SamplingParams(temperature=1.0, top_p=0.95, seed=3)
    logits = torch.randn(50, VOCAB, generator=torch.Generator().manual_seed(0))
    rows = [make_row(row, sampling) for row in range(50)]
    together = sample(logits, items_of(*rows), EOS).tolist()
    alone = [int(sample(logits[row : row + 1], items_of(rows[row]), EOS)[0]) for row in range(50)]
    backwards = sample(logits.flip(0), items_of(*rows[::-1]), EOS).tolist()
    assert together == alone == backwards[::-1]


def test_a_resumed_row_draws_what_it_would_have_drawn() -> None:
    sampling = SamplingParams(temperature=1.0, seed=3)
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    straight = make_row(4, sampling)
    for token in (30, 31):
        straight.expect()
        straight.resolve(token)
    resumed = make_row(4, sampling, output_ids=(30, 31))
    assert sample(logits, items_of(straight), EOS) == sample(logits, items_of(resumed), EOS)


def test_a_draw_needs_to_know_the_number_of_tokens_only() -> None:
    """A row whose last token is being sampled draws at the same position as when it is known."""
    sampling = SamplingParams(temperature=1.0, seed=3)
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    pending, known = make_row(4, sampling, output_ids=(30,)), make_row(4, sampling, output_ids=(30, 31))
    pending.expect()
    assert sample(logits, items_of(pending), EOS) == sample(logits, items_of(known), EOS)


def test_a_sample_draws_what_its_row_would_with_its_number_added_to_the_seed() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    for sample_idx in range(8):
        several = Request(8 * 5 + sample_idx, np.arange(4, dtype=np.int32), SamplingParams(temperature=1.0, seed=3),
                          num_samples=8)  # fmt: skip
        alone = Request(5, several.token_ids, SamplingParams(temperature=1.0, seed=3 + sample_idx))
        drawn = [sample(logits, items_of(Sequence(one, 0)), EOS) for one in (several, alone)]
        assert drawn[0] == drawn[1]


def test_samples_of_one_row_follow_the_distribution() -> None:
    """They are as independent of each other as rows are."""
    weights = torch.tensor([0.5, 0.25, 0.125, 0.125])
    requests = [
        Request(at, np.array([1], dtype=np.int32), SamplingParams(temperature=1.0), num_samples=4000)
        for at in range(4000)
    ]
    items = items_of(*(Sequence(one, 0) for one in requests))
    drawn = sample(weights.log().expand(4000, 4), items, ())
    np.testing.assert_allclose(np.bincount(drawn, minlength=4) / 4000, weights.numpy(), atol=0.04)
    pairs = np.bincount(4 * drawn[:-1] + drawn[1:], minlength=16) / 3999
    np.testing.assert_allclose(pairs, np.outer(weights, weights).reshape(-1), atol=0.04)


def test_draws_follow_the_distribution() -> None:
    weights = torch.tensor([0.5, 0.25, 0.125, 0.125])
    sampling = SamplingParams(temperature=1.0)
    rows = [make_sequence(row, [1], [], sampling) for row in range(4000)]
    counts = np.bincount(sample(weights.log().expand(4000, 4), items_of(*rows), ()), minlength=4) / 4000
    # Five standard deviations of a share of 1/2 over 4,000 draws.
    np.testing.assert_allclose(counts, weights.numpy(), atol=0.04)


def test_uniform_is_a_fixed_hash_of_seed_row_and_position() -> None:
    drawn = {uniform(seed, row, position) for seed in range(10) for row in range(10) for position in range(10)}
    assert len(drawn) == 1000
    assert 0 <= min(drawn) < 0.01 < 0.99 < max(drawn) < 1
    assert uniform(0, 0, 0) == uniform(0, 0, 0)
    assert abs(sum(drawn) / 1000 - 0.5) < 0.05


def test_greedy_takes_the_first_of_equal_maxima_as_argmax_does() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0, 40] = logits[0, 400] = 1.0
    rows = [make_row(0, SamplingParams()), make_row(1, SamplingParams())]
    assert sample(logits, items_of(*rows), EOS).tolist() == logits.argmax(dim=-1).tolist() == [40, 0]


def test_logits_are_not_changed() -> None:
    logits = torch.ones(1, VOCAB)
    sample(logits, items_of(make_row(0, SamplingParams(repetition_penalty=2.0, temperature=0.5))), EOS)
    assert torch.equal(logits, torch.ones(1, VOCAB))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_give_no_token(value: float) -> None:
    logits = torch.zeros(3, VOCAB)
    logits[1, 3] = value
    logits[2, 3] = 5
    greedy, random = SamplingParams(), SamplingParams(temperature=1.0)
    items = items_of(make_row(10, random), make_row(17, random), make_row(4, greedy))
    found = sample(logits, items, EOS).tolist()
    assert found[0] >= 0
    assert found[1:] == [NO_TOKEN, 3]


def test_a_batch_without_samples_gives_no_tokens() -> None:
    assert sample(torch.zeros(0, VOCAB), (), EOS).tolist() == []
