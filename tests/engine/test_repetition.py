"""A sequence that says the same over and over is noticed as soon as it does, and no other."""

from dataclasses import replace

import numpy as np
import pytest

from batchrun.engine.repetition import repeats_itself
from tests.engine.stepping import batches_of, request, scheduler


def ids(text: str) -> np.ndarray:
    return np.array([ord(letter) for letter in text], dtype=np.int32)


@pytest.mark.parametrize(
    ("text", "min_count", "max_pattern_size", "expected"),
    [
        ("", 2, 9, False),
        ("a", 2, 9, False),
        ("aa", 2, 9, True),
        ("xaaa", 3, 1, True),
        ("xabab", 2, 9, True),
        ("xabab", 2, 1, False),
        ("ababx", 2, 9, False),
        ("abcabdabc", 2, 9, False),
        ("aabaab", 2, 3, True),
        ("aabaab", 2, 2, False),
        ("bcabcab", 3, 9, False),
        ("abcabcabc", 3, 3, True),
        ("qabcabcabc", 4, 9, False),
    ],
)
def test_what_counts_as_repetition(text: str, min_count: int, max_pattern_size: int, expected: bool) -> None:
    assert repeats_itself(ids(text), min_count, max_pattern_size) == expected


def test_it_is_what_comparing_every_pattern_says() -> None:
    random = np.random.default_rng(0)
    for _ in range(500):
        output = random.integers(0, 2, int(random.integers(1, 20))).astype(np.int32)
        min_count, most = int(random.integers(2, 5)), int(random.integers(1, 7))
        said = output.tolist()
        obvious = any(
            len(said) >= size * min_count and said[-size * min_count :] == said[-size:] * min_count
            for size in range(1, most + 1)
        )
        assert repeats_itself(output, min_count, most) == obvious


def test_the_prompt_and_what_is_said_before_min_tokens_do_not_count() -> None:
    """Every token is the same here: the row would end with its third."""
    engine = scheduler()
    asked = request(0, [7] * 9, max_tokens=20)
    sampling = replace(asked.sampling, repetition_min_count=3, min_tokens=5)
    engine.add(replace(asked, sampling=sampling))
    assert sum(len(batch.sampled) for batch in batches_of(engine)) == 5
