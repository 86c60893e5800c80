"""Where the tokens of a prompt end and those of the text behind it begin."""

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from batchrun.plan.continuations import join
from batchrun.tokenizer import HFTokenizer

PIECES = ["<s>", " ", "a", "b", "c", " a", "ab", " ab", "bc"]


@pytest.fixture
def tokenizer() -> HFTokenizer:
    """Merges a space with what follows it, and letters across a border."""
    merges = [(" ", "a"), ("a", "b"), (" a", "b"), ("b", "c")]
    model = models.BPE({piece: at for at, piece in enumerate(PIECES)}, merges)
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_next")
    return HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>"))


def joined(tokenizer: HFTokenizer, prompt: str, *texts: str) -> tuple[list[str], list[list[str]]]:
    (one,) = join(tokenizer, [prompt], [texts], add_special_tokens=True)
    return [PIECES[at] for at in one.prompt], [[PIECES[at] for at in ids] for ids in one.endings]


def test_spaces_at_the_prompts_end_belong_to_the_text(tokenizer):
    """Alone, "ab" behind "c " would be tokens that the model never sees after a space."""
    assert joined(tokenizer, "c ", "ab", "c") == (["c"], [[" ab"], [" ", "c"]])
    alone = tokenizer.encode(["ab"], add_special_tokens=False)[0]
    assert [PIECES[at] for at in alone] == ["ab"]


def test_the_text_is_cut_where_the_prompts_own_tokens_end(tokenizer):
    """ "bc" would be one token alone, but "abc" is "ab" and "c": of the text only "c" is left to be scored."""
    assert joined(tokenizer, "a", "bc") == (["a"], [["c"]])
    assert joined(tokenizer, "c", "bc") == (["c"], [["bc"]])


def test_a_text_that_merges_with_the_prompt_has_no_tokens_of_its_own(tokenizer):
    assert joined(tokenizer, "ca", "b") == (["c", "a"], [[]])


def test_a_prompt_of_spaces_becomes_the_beginning_token(tokenizer):
    assert joined(tokenizer, " ", "ab") == (["<s>"], [[" ab"]])


def test_many_rows_keep_their_order(tokenizer):
    prompts, texts = ["a", "c ", "b"] * 5, [("c",), ("ab", "c"), ("c", "b", "a")] * 5
    found = list(join(tokenizer, prompts, texts, add_special_tokens=True))
    each = [next(join(tokenizer, [p], [t], add_special_tokens=True)) for p, t in zip(prompts, texts, strict=True)]
    for one, other in zip(found, each, strict=True):
        assert np.array_equal(one.prompt, other.prompt)
        assert [ids.tolist() for ids in one.endings] == [ids.tolist() for ids in other.endings]
