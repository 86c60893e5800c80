"""Text to token ids and back, in batches.

Knows nothing of rows, templates over columns, or models' weights; never truncates, pads or cleans up.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from batchrun.errors import ModelUnavailable, UsageError
from batchrun.imports import import_for_tokenizers

if TYPE_CHECKING:
    from batchrun.engine.request import TokenIds

Ids = Sequence[int] | NDArray[np.int32]  # [num_tokens]
Conversation = list[dict[str, Any]]  # messages: at least role and content


class Tokenizer(Protocol):
    """What the job side asks of a tokenizer."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    @property
    def bos_token_id(self) -> int | None: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def has_chat_template(self) -> bool: ...

    def encode(self, texts: list[str], *, add_special_tokens: bool) -> list["TokenIds"]:
        """One int32 [num_tokens] array a text; `add_special_tokens` adds what the model expects around plain text."""
        ...

    def decode(self, token_ids: Ids) -> str:
        """The text of the ids, special tokens left out, spaces as they are."""
        ...

    def decode_batch(self, token_ids: Sequence[Ids]) -> list[str]:
        """`decode` of each."""
        ...

    def chat(self, conversations: list[Conversation]) -> list[str]:
        """Each conversation as the model's prompt text, up to where its answer starts; special tokens written out.

        Raises whatever the model's chat template raises for a conversation that it refuses.
        """
        ...


class HFTokenizer:
    """A tokenizer of the transformers library."""

    def __init__(self, tokenizer: Any, *, chat_template: str | None = None) -> None:
        self._tokenizer = tokenizer
        if chat_template is not None:
            tokenizer.chat_template = chat_template
        # A tokenizer.json can carry truncation and padding of the model's training; a prompt is taken as it is.
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()

    @classmethod
    def load(
        cls, folder: str | Path, *, chat_template: str | None = None, trust_remote_code: bool = False
    ) -> "HFTokenizer":
        """The tokenizer of a model's folder (or of a hub id, from the cache); `chat_template` is a template's text.

        Raises:
            ModelUnavailable: there is none, or it cannot be read.
        """
        import_for_tokenizers()
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
        except (OSError, ValueError, KeyError, ImportError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise ModelUnavailable(f"no tokenizer in {folder}: {reason}; name one with --tokenizer") from error
        return cls(tokenizer, chat_template=chat_template)

    @property
    def native(self) -> Any:
        """The library's own, with this chat template."""
        return self._tokenizer

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        eos = self._tokenizer.eos_token_id
        return () if eos is None else (int(eos),)

    @property
    def bos_token_id(self) -> int | None:
        bos = self._tokenizer.bos_token_id
        return None if bos is None else int(bos)

    @property
    def vocab_size(self) -> int:
        return len(self._tokenizer)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def serialized(self) -> str | None:
        """The content of a tokenizer.json; None of a tokenizer that has none."""
        return None if self._backend is None else str(self._backend.to_str())

    def encode(self, texts: list[str], *, add_special_tokens: bool) -> list["TokenIds"]:
        if self._backend is not None:
            encodings = self._backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
            return [np.asarray(encoding.ids, dtype=np.int32) for encoding in encodings]
        if not texts:
            return []
        encoded = self._tokenizer(texts, add_special_tokens=add_special_tokens)
        return [np.asarray(ids, dtype=np.int32) for ids in encoded["input_ids"]]

    def decode(self, token_ids: Ids) -> str:
        return self.decode_batch([token_ids])[0]

    def decode_batch(self, token_ids: Sequence[Ids]) -> list[str]:
        plain = [np.asarray(ids, dtype=np.int64).tolist() for ids in token_ids]
        texts = self._tokenizer.batch_decode(plain, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return [str(text) for text in texts]

    def chat(self, conversations: list[Conversation]) -> list[str]:
        if not conversations:
            return []
        rendered = self._tokenizer.apply_chat_template(conversations, tokenize=False, add_generation_prompt=True)
        return [str(text) for text in rendered]


class EchoTokenizer:
    """Bytes: id = byte + 3; 0 pads, 1 begins a plain text (BOS), 2 ends one (EOS). Belongs to the model `echo`."""

    eos_token_ids: tuple[int, ...] = (2,)
    bos_token_id: int | None = 1
    vocab_size = 259
    has_chat_template = False

    def encode(self, texts: list[str], *, add_special_tokens: bool) -> list["TokenIds"]:
        encoded = [text.encode() for text in texts]
        start = int(add_special_tokens)
        lengths = np.fromiter((len(raw) + start for raw in encoded), dtype=np.int64, count=len(encoded))
        mark = b"\0" * start
        ids = np.frombuffer(b"".join(mark + raw for raw in encoded), dtype=np.uint8).astype(np.int32) + 3
        ends = np.cumsum(lengths)
        if start:
            ids[ends - lengths] = 1
        return [ids[end - length : end] for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)]

    def decode(self, token_ids: Ids) -> str:
        ids = np.asarray(token_ids, dtype=np.int64)
        return (ids[ids >= 3] - 3).astype(np.uint8).tobytes().decode(errors="replace")

    def decode_batch(self, token_ids: Sequence[Ids]) -> list[str]:
        return [self.decode(ids) for ids in token_ids]

    def chat(self, conversations: list[Conversation]) -> list[str]:
        raise UsageError("the model `echo` has no chat template; use --chat off")
