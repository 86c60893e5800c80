"""How likely choices are behind a prompt that says nothing: what their probabilities are held against.

Domain-conditional pointwise mutual information (Holtzman et al., EMNLP 2021, section 3). Knows nothing of rows.
"""

from functools import lru_cache
from typing import TYPE_CHECKING

from batchrun.errors import UsageError
from batchrun.plan.asked import Prior
from batchrun.plan.continuations import join

if TYPE_CHECKING:
    from batchrun.tokenizer import Tokenizer

_KEPT = 4096  # lists of choices whose tokens are remembered


class ChoicePrior:
    """Choices behind `prompt`, which is a text as the model is to read it."""

    def __init__(self, tokenizer: "Tokenizer", prompt: str, max_model_len: int, *, adds_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._max_model_len = max_model_len
        self._adds = adds_special_tokens
        self.behind = lru_cache(_KEPT)(self._behind)

    def _behind(self, texts: tuple[str, ...]) -> Prior:
        """The tokens of prompt and choices. Raises UsageError: a choice has none there, or they are too many."""
        (joined,) = join(self._tokenizer, [self._prompt], [texts], add_special_tokens=self._adds)
        lengths = list(map(len, joined.endings))
        if not all(lengths):
            text = texts[lengths.index(0)]
            raise UsageError(f"--choice-prior: behind it, {text!r} has no tokens of its own; end it with a space")
        longest = len(joined.prompt) + max(lengths) - 1
        if longest > self._max_model_len:
            raise UsageError(
                f"--choice-prior has {longest:,} tokens with its longest choice, more than --max-model-len "
                f"{self._max_model_len:,} has room for; shorten it"
            )
        return Prior(tuple(joined.prompt.tolist()), tuple(tuple(ids.tolist()) for ids in joined.endings))
