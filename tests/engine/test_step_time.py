"""Step times are learned from measured steps, and what is learned is the best there is of its kind."""

from itertools import chain, combinations

import numpy as np
import pytest

from batchrun.engine.request import Request, SamplingParams
from batchrun.engine.sequence import Sequence
from batchrun.engine.step import Item, ScheduledBatch
from batchrun.engine.step_time import TERMS, StepSize, StepTimes, fit, non_negative_least_squares, relative_errors


def item(start: int, num_tokens: int, *, samples: bool) -> Item:
    ids = np.zeros(start + num_tokens, dtype=np.int32)
    return Item(Sequence(Request(0, ids, SamplingParams(max_tokens=1)), arrival=0), start, num_tokens, samples)


def random_sizes(rng: np.random.Generator, num: int) -> list[StepSize]:
    sizes = []
    for _ in range(num):
        rows, tokens = int(rng.integers(1, 64)), int(2 ** rng.uniform(0, 11))
        kv = float(rng.integers(1, 5000)) * rows
        sampled = int(rng.integers(0, rows + 1))
        sizes.append(StepSize(max(rows, tokens), rows, sampled, kv, kv * rng.uniform(1, 20)))
    return sizes


def made_up_times(rng: np.random.Generator) -> StepTimes:
    """Costs of very different sizes, as they are, some of them nothing."""
    magnitude = {"step": 1e-2, "sampling": 1e-3, "kv_token": 1e-7, "pair": 1e-9}
    costs = {name: magnitude.get(name, 1e-4) * rng.uniform(0.1, 2) * (rng.random() < 0.7) for name in TERMS}
    return StepTimes.named(costs | {"step": 1e-2})


def test_a_batch_is_as_large_as_its_tokens_and_what_they_attend_to():
    batch = ScheduledBatch((item(0, 7, samples=True), item(110, 1, samples=True), item(48, 63, samples=False)))
    attended = [range(1, 8), range(111, 112), range(49, 112)]
    assert StepSize.of(batch) == StepSize(
        num_tokens=71, num_rows=3, num_sampled=2, kv_tokens=7 + 111 + 111, pairs=sum(map(sum, attended))
    )


def test_a_step_without_tokens_takes_no_time():
    times = StepTimes(tuple(1.0 for _ in TERMS))
    assert times.seconds(StepSize.of(ScheduledBatch(()))) == 0.0


@pytest.mark.parametrize("seed", range(5))
def test_a_made_up_surface_is_recovered(seed):
    """Also where nothing was measured."""
    rng = np.random.default_rng(seed)
    truth, sizes = made_up_times(rng), random_sizes(rng, 111)
    found = fit(sizes, [truth.seconds(size) for size in sizes])
    others = random_sizes(rng, 63)
    assert relative_errors(found, others, [truth.seconds(size) for size in others]).max() < 1e-6


def test_errors_of_measuring_do_not_add_up():
    """A twentieth of noise on each step leaves the sum of many steps right to a hundredth or two."""
    rng = np.random.default_rng(3)
    truth, sizes = made_up_times(rng), random_sizes(rng, 111)
    found = fit(sizes, [truth.seconds(size) * rng.uniform(0.95, 1.05) for size in sizes])
    others = random_sizes(rng, 1000)
    true_s = sum(map(truth.seconds, others))
    assert sum(map(found.seconds, others)) == pytest.approx(true_s, rel=0.02)


def test_a_larger_step_never_seems_quicker():
    rng = np.random.default_rng(5)
    sizes = random_sizes(rng, 63)
    found = fit(sizes, rng.uniform(0.01, 1.0, 63).tolist())
    assert min(found.costs) >= 0


@pytest.mark.parametrize("seed", range(40))
def test_no_choice_of_columns_explains_more(seed):
    """The oracle: every subset of columns solved alone, of those solutions that are not negative the best."""
    rng = np.random.default_rng(seed)
    num = int(rng.integers(1, 6))
    a = rng.normal(size=(7, num)) * 10.0 ** rng.integers(-6, 6, num)
    if seed % 4 == 0:
        a[:, -1] = a[:, 0]
    if seed % 7 == 0:
        a[:, 0] = 0.0
    b = rng.normal(size=7)
    best = float(np.linalg.norm(b))
    for columns in chain.from_iterable(combinations(range(num), count) for count in range(1, num + 1)):
        x = np.linalg.lstsq(a[:, columns], b, rcond=None)[0]
        if (x >= 0).all():
            best = min(best, float(np.linalg.norm(a[:, columns] @ x - b)))
    found = non_negative_least_squares(a, b)
    assert (found >= 0).all()
    assert np.linalg.norm(a @ found - b) == pytest.approx(best, rel=1e-6)


def test_costs_are_named_and_none_is_missing():
    costs = dict.fromkeys(TERMS, 0.5)
    assert StepTimes.named(costs).by_name == costs
    for wrong in ({"step": 1.0}, costs | {"else": 1.0}, costs | {"pair": -1.0}):
        with pytest.raises(ValueError, match="costs of"):
            StepTimes.named(wrong)
