"""The task of scoring: how likely is a given text behind its prompt, token by token.

A text without a prompt that is longer than the model's length is scored in windows, each but the first of which begins
with the token before it; the last one reaches back as far as it may.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from batchrun.engine.request import Completion, Request, TokenIds, TokenLogprobs
from batchrun.job import Job
from batchrun.plan.asked import target_tokens
from batchrun.tasks.generate import PlannedRow, prefixed
from batchrun.tasks.scored import ReadingTask, result_rows, with_usual

COLUMNS = with_usual(
    [
        ("target_logprob", pa.float64()),
        ("target_tokens", pa.int32()),
        ("target_logprobs", pa.list_(pa.float32())),
        ("target_is_greedy", pa.bool_()),
    ]
)


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens `start ... end` of a row are computed, and those behind the last `num_scored` of them are scored."""

    start: int
    end: int
    num_scored: int


class ScoreTask(ReadingTask):
    """Log-likelihoods of the rows' targets; a window has at most `max_model_len` tokens."""

    def __init__(self, job: Job, max_model_len: int, *, shares_prefixes: bool) -> None:
        self.sampling = job.sampling
        self._prefix = job.output_prefix
        self._max_model_len = max_model_len
        self._shares_prefixes = shares_prefixes

    def requests(self, row: PlannedRow, output_ids: tuple[int, ...] = ()) -> tuple[Request, ...]:
        """What to run for a row: one request for each window. Its last token is not computed."""
        found = windows(len(row.token_ids), target_tokens(row.params or ""), self._max_model_len)
        return tuple(self._request(row, at, window) for at, window in enumerate(found))

    def _request(self, row: PlannedRow, at: int, window: Window) -> Request:
        tokens: TokenIds = row.token_ids[window.start : window.end]
        positions = np.arange(len(tokens) - window.num_scored, len(tokens), dtype=np.int32)
        reads = TokenLogprobs(positions, row.token_ids[window.start + 1 + positions])
        keep_len = min(row.keep_len, len(tokens)) if at == 0 else 0
        return Request(row.row_idx, tokens, self.sampling, keep_len, reads=reads, branch=at)

    def fold(self, finished: Sequence[tuple[PlannedRow, tuple[Completion, ...]]]) -> pa.Table:
        """The result rows of finished rows and their duplicates; `COLUMNS`."""
        rows = [result for row, completions in finished for result in self._results(row, completions)]
        return prefixed(pa.Table.from_pylist(rows, schema=COLUMNS), self._prefix)

    def _results(self, row: PlannedRow, completions: tuple[Completion, ...]) -> list[dict[str, object]]:
        num_target = 0 if row.params is None else target_tokens(row.params)
        prompt_tokens = len(row.token_ids) - num_target
        readings = [one.readings for one in completions if one.readings is not None]
        read = np.concatenate([np.empty((0, 2)), *readings])
        own = {
            "target_logprob": float(read[:, 0].sum()),
            "target_tokens": num_target,
            "target_logprobs": read[:, 0].tolist(),
            "target_is_greedy": bool(read[:, 1].all()),
        }
        cached_tokens = cached_len(row.shared_len, prompt_tokens) if self._shares_prefixes else 0
        return list(result_rows(row, completions, own, cached_tokens, prompt_tokens))


def cached_len(shared_len: int, prompt_tokens: int) -> int:
    """Tokens of a row that another's serve: what their targets share is computed again, for it is read."""
    return min(shared_len, max(prompt_tokens - 1, 0))


def windows(num_tokens: int, num_scored: int, max_len: int) -> list[Window]:
    """How the last `num_scored` of a row's tokens are scored with at most `max_len` of them computed at a time."""
    found, done = [], num_tokens - num_scored
    while done < num_tokens:
        end = min(done + max_len, num_tokens)
        start = max(0, end - 1 - max_len) if end == num_tokens else done - 1
        found.append(Window(start, end - 1, end - done))
        done = end
    return found
