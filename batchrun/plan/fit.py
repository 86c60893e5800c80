"""Holds prompts to the model's length.

Knows nothing of columns, tokenizers or sampling beyond how many tokens an answer may have.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from batchrun.errors import DataError, RowError, UsageError

if TYPE_CHECKING:
    from batchrun.engine.request import TokenIds
    from batchrun.job import Job
    from batchrun.model_spec import ModelSpec

# A text of so many characters for each token that fits is tokenised from its start (or end) only, when that is enough
# to see that it does not fit; near the place of the cut the tokens may differ, so a margin of them is not relied on.
_CHARS_PER_TOKEN = 32
_PROBED_CHARS = 1 << 20
_MARGIN_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Fit:
    """What happens to a prompt that leaves no room for a token. Lengths are tokens.

    A cut prompt keeps `cut_len`: room for the whole answer, but at least half of the model's length.
    """

    on_overlong: Literal["error", "truncate-left", "truncate-right", "fail"]
    max_model_len: int
    cut_len: int

    @classmethod
    def of(cls, job: "Job", spec: "ModelSpec") -> "Fit":
        """Raises UsageError: the job asks for more than the model's length."""
        longest = effective_max_model_len(job, spec)
        return cls(job.on_overlong, longest, longest - min(job.max_tokens, longest // 2))

    @property
    def max_prompt_len(self) -> int:
        return self.max_model_len - 1

    def probe(self, text: str) -> str:
        """The text, or the part of it that decides, when it is very long."""
        num_chars = max(_CHARS_PER_TOKEN * self.max_model_len, _PROBED_CHARS)
        if len(text) <= num_chars:
            return text
        return text[-num_chars:] if self.on_overlong == "truncate-left" else text[:num_chars]

    def is_misjudged(self, text: str, probe: str, num_tokens: int) -> bool:
        """Whether a text may fit of which only the probe was tokenised, to `num_tokens`."""
        return len(probe) < len(text) and num_tokens <= self.max_prompt_len + _MARGIN_TOKENS

    def apply(self, row: int, ids: "TokenIds", bos: int | None, given: int | None = None) -> "TokenIds | RowError":
        """The ids that run, without a doubled BOS; a cut prompt keeps its BOS.

        Behind them come `given` tokens, the last of which is not computed; None: an answer of unknown length.

        Raises:
            DataError: too long, and the job is to fail then.
        """
        if bos is not None and len(ids) > 1 and ids[0] == bos == ids[1]:
            ids = ids[1:]
        if not len(ids):
            return RowError("empty_prompt", f"row {row}: the prompt has no tokens; fill it or filter the row out")
        longest = self.max_prompt_len if given is None else self.max_model_len + 1 - given
        cut_len = self.cut_len if given is None else longest
        if len(ids) <= longest:
            return ids
        if self.on_overlong == "truncate-right" and longest > 0:
            return ids[:cut_len]
        if self.on_overlong == "truncate-left" and longest > 0:
            kept = ids[-cut_len:].copy()
            if bos is not None and ids[0] == bos:
                kept[0] = bos
            return kept
        message = (
            f"row {row}: the prompt has at least {len(ids):,} tokens, more than the {max(longest, 0):,} that "
            f"--max-model-len {self.max_model_len:,} has room for; shorten it, or --on-overlong truncate-left"
        )
        if self.on_overlong == "fail":
            raise DataError(message)
        return RowError("overlong_prompt", message)


def effective_max_model_len(job: "Job", spec: "ModelSpec") -> int:
    """Tokens of prompt and output together, at most; the job's or else the model's.

    Raises:
        UsageError: the job asks for more than the model's length.
    """
    if job.max_model_len is None:
        return spec.max_model_len
    if job.max_model_len > spec.max_model_len:
        raise UsageError(f"--max-model-len {job.max_model_len:,} is more than {spec.name}'s {spec.max_model_len:,}")
    return job.max_model_len
