"""Tokenizers: batches in, int32 arrays out, and back."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from batchrun.errors import ModelUnavailable, UsageError
from batchrun.tokenizer import EchoTokenizer, HFTokenizer

CHAT = "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}<assistant>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved word tokenizer that puts <s> before a plain text and, as some do, carries truncation and padding."""
    words = ["<unk>", "<s>", "</s>", "hello", "world", "<user>", "<assistant>"]
    backend = Backend(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.enable_truncation(2)
    backend.enable_padding(pad_id=2, pad_token="</s>")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=CHAT
    )
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return folder


def as_lists(encoded: list[Any]) -> list[list[int]]:
    assert all(ids.dtype == np.int32 for ids in encoded)
    return [ids.tolist() for ids in encoded]


@given(st.lists(st.text()))
def test_echo_ids_are_the_bytes_and_three(texts: list[str]) -> None:
    tokenizer = EchoTokenizer()
    plain = [[byte + 3 for byte in text.encode()] for text in texts]
    assert as_lists(tokenizer.encode(texts, add_special_tokens=False)) == plain
    assert as_lists(tokenizer.encode(texts, add_special_tokens=True)) == [[1, *ids] for ids in plain]
    assert tokenizer.decode_batch(tokenizer.encode(texts, add_special_tokens=True)) == texts


def test_echo_decodes_broken_utf8_and_skips_special_tokens() -> None:
    assert EchoTokenizer().decode([1, 0xC3 + 3, 2, ord("a") + 3]) == "\ufffda"


def test_echo_has_no_chat() -> None:
    with pytest.raises(UsageError, match="--chat off"):
        EchoTokenizer().chat([[{"role": "user", "content": "x"}]])


def test_prompts_are_neither_truncated_nor_padded(folder: Path) -> None:
    tokenizer = HFTokenizer.load(folder)
    texts = ["hello world hello", "hello"]
    assert as_lists(tokenizer.encode(texts, add_special_tokens=True)) == [[1, 3, 4, 3], [1, 3]]
    assert as_lists(tokenizer.encode(texts, add_special_tokens=False)) == [[3, 4, 3], [3]]
    assert tokenizer.encode([], add_special_tokens=True) == []


def test_facts_of_a_saved_tokenizer(folder: Path) -> None:
    tokenizer = HFTokenizer.load(folder)
    facts = (tokenizer.eos_token_ids, tokenizer.bos_token_id, tokenizer.vocab_size, tokenizer.has_chat_template)
    assert facts == ((2,), 1, 7, True)


def test_decoding_leaves_special_tokens_out(folder: Path) -> None:
    tokenizer = HFTokenizer.load(folder)
    assert tokenizer.decode(np.array([1, 3, 4, 2], dtype=np.int32)) == "hello world"
    assert tokenizer.decode_batch([[3], [], [4, 2]]) == ["hello", "", "world"]


def test_chat_template_is_the_models_or_the_one_given(folder: Path) -> None:
    conversations = [[{"role": "user", "content": "hello"}], [{"role": "user", "content": "world"}]]
    assert HFTokenizer.load(folder).chat(conversations) == ["<user> hello <assistant>", "<user> world <assistant>"]
    own = HFTokenizer.load(folder, chat_template="{{ messages[0].content }}!")
    assert own.chat(conversations) == ["hello!", "world!"]
    assert own.chat([]) == []


def test_folder_without_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=f"no tokenizer in {tmp_path}.*--tokenizer"):
        HFTokenizer.load(tmp_path)
