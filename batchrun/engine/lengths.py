"""How long an output will be: known, or learned from the rows that have finished."""

from math import ceil, sqrt

from batchrun.engine.request import SamplingParams

_FEW = 16  # rows; below it the mean says little
_FIRST_GUESS = 0.5  # of max_tokens, until then


class OutputLengths:
    """Mean and spread of finished outputs, in tokens (Welford's online algorithm)."""

    def __init__(self) -> None:
        self._count = 0
        self._mean = 0.0
        self._squares = 0.0

    def observe(self, output_len: int) -> None:
        """A row has finished with this many tokens."""
        self._count += 1
        delta = output_len - self._mean
        self._mean += delta / self._count
        self._squares += delta * (output_len - self._mean)

    def mean(self, sampling: SamplingParams) -> float:
        """Tokens of an output on average."""
        if sampling.ignore_eos and not sampling.stop and not sampling.stop_token_ids:
            return sampling.max_tokens
        return self._mean if self._count >= _FEW else sampling.max_tokens * _FIRST_GUESS

    def expected(self, sampling: SamplingParams, output_len: int) -> int:
        """Tokens to reserve room for, of a row with `output_len` tokens so far: the mean and one deviation."""
        deviation = sqrt(self._squares / self._count) if self._count >= _FEW else 0.0
        return min(sampling.max_tokens, max(ceil(self.mean(sampling) + deviation), output_len + 1))
