"""How choices become chains of tokens, and long texts windows."""

import random
from collections import Counter

import pytest

from batchrun.tasks.choose import chains, shared_len, steps
from batchrun.tasks.score import Window, windows


def test_choices_of_one_token_are_one_chain_that_computes_nothing():
    (chain,) = chains([(5,), (3,), (9,)])
    assert chain.tokens == ()
    assert chain.asked == (((), 3), ((), 5), ((), 9))


@pytest.mark.parametrize("seed", range(50))
def test_every_token_is_asked_for_once_and_no_context_computed_twice(seed):
    rng = random.Random(seed)
    texts = {tuple(rng.randint(1, 3) for _ in range(rng.randint(1, 5))) for _ in range(rng.randint(1, 12))}
    choices = sorted(texts)
    found = chains(choices)
    asked = [pair for chain in found for pair in chain.asked]
    assert Counter(asked) == Counter({step for choice in choices for step in steps(choice)})
    inner = {choice[:end] for choice in choices for end in range(1, len(choice))}
    computed, last = 0, ()
    for chain in found:
        # What it shares with the chain before it is all that any earlier chain has of it.
        computed += len(chain.tokens) - shared_len(last, chain.tokens)
        assert all(chain.tokens[: len(context)] == context for context, _ in chain.asked)
        last = chain.tokens
    assert computed == len(inner)


def rolling(tokens: list[int], prefix: int, longest: int) -> list[tuple[list[int], list[int]]]:
    """What the harness feeds a model, (input, predicted): `longest` tokens a window, one token of context; the last
    window has as much context as fits."""
    whole, found, done = [prefix, *tokens], [], 0
    while done < len(tokens):
        num = min(longest, len(tokens) - done)
        is_last = done + num == len(tokens)
        start = max(0, done + num - longest) if is_last else done
        found.append((whole[start : done + num], tokens[done : done + num]))
        done += num
    return found


@pytest.mark.parametrize("num_tokens", [1, 2, 6, 7, 8, 13, 14, 15, 40])
def test_windows_are_the_harnesses(num_tokens):
    tokens = list(range(100, 100 + num_tokens))
    whole = [1, *tokens]
    found = windows(len(whole), num_tokens, 7)
    ours = [(whole[one.start : one.end], whole[one.end + 1 - one.num_scored : one.end + 1]) for one in found]
    assert ours == rolling(tokens, 1, 7)


def test_a_target_behind_a_prompt_has_one_window():
    assert windows(num_tokens=8, num_scored=3, max_len=7) == [Window(0, 7, 3)]
