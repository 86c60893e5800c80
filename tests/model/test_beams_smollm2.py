"""Beams on the real model: the texts are those of `transformers.generate(num_beams=…)`, float ties aside."""

from typing import Any

import pytest

from batchrun.checkpoint import cache_folder, load_tokenizer, resolve
from tests.endurance.against_beams import TIE, Ids, Plain, prompts, search, without_padding

NUM_ROWS, NUM_TOKENS = 4, 10


@pytest.fixture(scope="module")
def plain() -> Plain:
    return Plain.load()


@pytest.fixture(scope="module")
def asked() -> list[Ids]:
    checkpoint = resolve(None, revision=None, cache=cache_folder(), trust_remote_code=False)
    tokenizer = load_tokenizer(checkpoint, tokenizer=None, chat_template=None, trust_remote_code=False)
    return prompts(tokenizer, NUM_ROWS)


@pytest.mark.parametrize(
    ("options", "room"),
    [
        pytest.param({"num_beams": 2}, {}, id="two"),
        pytest.param({"num_beams": 4}, {"kv_cache_memory": 12 << 20, "max_num_seqs": 16}, id="four-in-little-room"),
        pytest.param({"num_beams": 3, "length_penalty": 0.0, "early_stopping": True}, {}, id="early"),
    ],
)
def test_texts_are_those_of_transformers(
    plain: Plain, asked: list[Ids], options: dict[str, Any], room: dict[str, Any]
) -> None:
    eos_token_ids = resolve(None, revision=None, cache=cache_folder(), trust_remote_code=False).spec.eos_token_ids
    found = search(asked, NUM_TOKENS, **options, **room)
    penalty = options.get("length_penalty", 1.0)
    for prompt, ours in zip(asked, found.texts, strict=True):
        theirs = without_padding(plain.search(prompt, NUM_TOKENS, **options), eos_token_ids)
        if ours != theirs:
            margin = abs(plain.score(prompt, ours, penalty) - plain.score(prompt, theirs, penalty))
            assert margin < TIE, (ours, theirs, margin)
    assert found.shared < found.unshared
