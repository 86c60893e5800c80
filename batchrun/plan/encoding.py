"""Texts to token ids: prompts, whole texts, prompts with texts behind them, and what was tokenised before.

In large batches, and of a hopelessly long prompt only as much as shows that it does not fit. Knows nothing of columns.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from batchrun.plan.continuations import Joined, join, prefix_token
from batchrun.plan.fit import Fit

if TYPE_CHECKING:
    from batchrun.engine.request import TokenIds
    from batchrun.tokenizer import Tokenizer

_TOKENISED_CHARS = 8 << 20


class Encoding(Protocol):
    """Makes token ids of rows that have not failed."""

    def encode(self, texts: list[Any], behind: list[tuple[Any, ...]]) -> Iterator[Joined]:
        """The tokens of each row's text, and of what is asked about behind it."""
        ...


class GivenTokens:
    """Rows and what is behind them are token ids. Rolling, a row is behind what stands before a text without prompt."""

    def __init__(self, tokenizer: "Tokenizer", *, is_rolling: bool) -> None:
        self._tokenizer = tokenizer
        self._is_rolling = is_rolling

    def encode(self, texts: "list[TokenIds]", behind: "list[tuple[TokenIds, ...]]") -> Iterator[Joined]:
        """See `Encoding`."""
        for ids, own in zip(texts, behind, strict=True):
            yield Joined(prefix_token(self._tokenizer), [ids]) if self._is_rolling else Joined(ids, list(own))


class WholeTexts:
    """Texts without a prompt, each behind what stands before such a text."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer

    def encode(self, texts: list[str], behind: list[tuple[Any, ...]]) -> Iterator[Joined]:
        """See `Encoding`; nothing more is behind them."""
        first = prefix_token(self._tokenizer)
        for chunk in _chunks(texts):
            for ids in self._tokenizer.encode(chunk, add_special_tokens=False):
                yield Joined(first, [ids])


class Prompts:
    """Texts with nothing behind them."""

    def __init__(self, tokenizer: "Tokenizer", fit: Fit, *, adds_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._fit = fit
        self._adds = adds_special_tokens

    def encode(self, texts: list[str], behind: list[tuple[Any, ...]]) -> Iterator[Joined]:
        """See `Encoding`."""
        for chunk in _chunks(texts):
            probes = [self._fit.probe(text) for text in chunk]
            encoded = self._tokenizer.encode(probes, add_special_tokens=self._adds)
            for text, probe, ids in zip(chunk, probes, encoded, strict=True):
                if self._fit.is_misjudged(text, probe, len(ids)):
                    (whole,) = self._tokenizer.encode([text], add_special_tokens=self._adds)
                    yield Joined(whole, [])
                else:
                    yield Joined(ids, [])


class TextsBehind:
    """Prompts and the texts behind them, each tokenised together with its prompt."""

    def __init__(self, tokenizer: "Tokenizer", fit: Fit, *, adds_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._fit = fit
        self._adds = adds_special_tokens

    def encode(self, texts: list[str], behind: list[tuple[str, ...]]) -> Iterator[Joined]:
        """See `Encoding`."""
        probes = [self._fit.probe(text) for text in texts]
        found = join(self._tokenizer, probes, behind, add_special_tokens=self._adds)
        for text, own, probe, joined in zip(texts, behind, probes, found, strict=True):
            if self._fit.is_misjudged(text, probe, len(joined.prompt)):
                yield from join(self._tokenizer, [text], [own], add_special_tokens=self._adds)
            else:
                yield joined


def _chunks(texts: list[str]) -> Iterator[list[str]]:
    """The texts in order, some MiB at a time."""
    chunk: list[str] = []
    size = 0
    for text in texts:
        chunk.append(text)
        size += len(text)
        if size >= _TOKENISED_CHARS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
