"""The task of choosing: which of several given texts is the likeliest behind a prompt, by exact log-likelihoods.

The choices of a row are a trie of tokens behind its prompt. It is computed as chains, each behind what it shares with
the one before, so that no token is computed twice; the last token of a choice is not computed at all, and choices of
one token need no more than the prompt's last position.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchrun.engine.request import Completion, Request, TokenLogprobs
from batchrun.job import Job
from batchrun.option_types import ChoiceNormalise
from batchrun.plan.asked import Choice, choices_of, contexts_of
from batchrun.tasks.generate import PlannedRow, prefixed
from batchrun.tasks.scored import ReadingTask, result_rows, with_usual

COLUMNS = with_usual(
    [
        ("label", pa.string()),
        ("label_prob", pa.float64()),
        ("choice_logprobs", pa.list_(pa.float64())),
        ("choice_probs", pa.list_(pa.float64())),
    ]
)
_KEPT = 4096  # lists of choices whose trie is remembered
Context = tuple[int, ...]  # the beginning of a choice, in tokens


@dataclass(frozen=True, slots=True)
class Chain:
    """Tokens behind the prompt that are computed one after another, and what is read on the way.

    `asked` are contexts along the chain, none of which an earlier chain has, with a token that is wanted behind them.
    """

    tokens: Context
    asked: tuple[tuple[Context, int], ...]


class ChooseTask(ReadingTask):
    """Labels for a job's rows."""

    def __init__(self, job: Job, *, shares_prefixes: bool) -> None:
        self.sampling = job.sampling
        self._prefix = job.output_prefix
        self._normalise: ChoiceNormalise = job.choice_normalise
        self._shares_prefixes = shares_prefixes
        self._choices = lru_cache(_KEPT)(choices_of)
        self._chains = lru_cache(_KEPT)(lambda asked: chains(choices_of(asked)))

    def requests(self, row: PlannedRow, output_ids: tuple[int, ...] = ()) -> tuple[Request, ...]:
        """What to run for a row: one request for each chain, in the order in which they share."""
        found = self._chains(row.params or "")
        num_prompt = len(row.token_ids)
        requests = []
        for at, chain in enumerate(found):
            positions = np.array([num_prompt - 1 + len(context) for context, _ in chain.asked], np.int32)
            wanted = np.array([token for _, token in chain.asked], np.int32)
            tokens = np.concatenate([row.token_ids, np.array(chain.tokens, np.int32)])
            keep_len = row.keep_len
            if at + 1 < len(found):
                keep_len = num_prompt + shared_len(chain.tokens, found[at + 1].tokens)
            reads = TokenLogprobs(positions, wanted)
            requests.append(Request(row.row_idx, tokens, self.sampling, keep_len, reads=reads, branch=at))
        return tuple(requests)

    def fold(self, finished: Sequence[tuple[PlannedRow, tuple[Completion, ...]]]) -> pa.Table:
        """The result rows of finished rows and their duplicates; `COLUMNS`."""
        rows = [result for row, completions in finished for result in self._results(row, completions)]
        return prefixed(pa.Table.from_pylist(rows, schema=COLUMNS), self._prefix)

    def _results(self, row: PlannedRow, completions: tuple[Completion, ...]) -> list[dict[str, object]]:
        own = {} if any(one.error for one in completions) else self._chosen(row, completions)
        cached_tokens = row.shared_len if self._shares_prefixes else 0
        return list(result_rows(row, completions, own, cached_tokens, len(row.token_ids)))

    def _chosen(self, row: PlannedRow, completions: tuple[Completion, ...]) -> dict[str, object]:
        choices = self._choices(row.params or "")
        read: dict[tuple[Context, int], float] = {}
        for chain, completion in zip(self._chains(row.params or ""), completions, strict=True):
            assert completion.readings is not None, completion
            read |= zip(chain.asked, completion.readings[:, 0].tolist(), strict=True)
        logprobs = np.array([sum(read[step] for step in steps(choice)) for choice in choices])
        scores = logprobs / lengths(choices, self._normalise)
        probs = np.exp(scores - scores.max())
        probs /= probs.sum()
        best = int(probs.argmax())
        return {
            "label": choices[best].text,
            "label_prob": float(probs[best]),
            "choice_logprobs": logprobs.tolist(),
            "choice_probs": probs.tolist(),
        }


def steps(choice: Choice) -> list[tuple[Context, int]]:
    """The tokens of a choice, each with what of the choice stands before it."""
    return [(choice.token_ids[:end], token) for end, token in enumerate(choice.token_ids)]


def chains(choices: tuple[Choice, ...]) -> list[Chain]:
    """The trie of the choices: chains that together have every inner node, ordered so that neighbours share most."""
    asked: defaultdict[Context, list[int]] = defaultdict(list)
    for context, token in sorted({step for choice in choices for step in steps(choice)}):
        asked[context].append(token)
    contexts = contexts_of(choices)
    # Sorted, a context that goes on stands before one that continues it.
    ends = [one for one, following in zip(contexts, [*contexts[1:], ()], strict=True) if following[: len(one)] != one]
    found, known = [], -1
    for end in ends or [()]:
        new = [end[:length] for length in range(known + 1, len(end) + 1)]
        found.append(Chain(end, tuple((context, token) for context in new for token in asked[context])))
        known = shared_len(end, ends[len(found)]) if len(found) < len(ends) else -1
    return found


def shared_len(one: Context, other: Context) -> int:
    """Tokens that two chains have in common."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def lengths(choices: tuple[Choice, ...], normalise: ChoiceNormalise) -> NDArray[np.float64]:
    """By what each choice's log-likelihood is divided."""
    match normalise:
        case "none":
            return np.ones(len(choices))
        case "tokens":
            return np.array([len(choice.token_ids) for choice in choices], np.float64)
        case "bytes":
            return np.array([len(choice.text.encode()) for choice in choices], np.float64)
