"""The task of choosing: which of several given texts is the likeliest behind a prompt, by exact log-likelihoods.

The choices of a row are a trie of tokens behind its prompt. It is computed as chains, each behind what it shares with
the one before, so that no token is computed twice; the last token of a choice is not computed at all, and choices of
one token need no more than the prompt's last position.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchrun.engine.request import Completion, Request, TokenIds, TokenLogprobs
from batchrun.job import Job
from batchrun.option_types import ChoiceNormalise
from batchrun.plan.asked import Choice, Prior, choices_of, contexts_of, prior_of
from batchrun.tasks.generate import PlannedRow, prefixed
from batchrun.tasks.scored import ReadingTask, result_rows, with_usual

_COLUMNS = (
    ("label", pa.string()),
    ("label_prob", pa.float64()),
    ("choice_logprobs", pa.list_(pa.float64())),
    ("choice_probs", pa.list_(pa.float64())),
)
_PRIOR_COLUMN = ("choice_prior_logprobs", pa.list_(pa.float64()))
_KEPT = 4096  # lists of choices whose trie is remembered
Context = tuple[int, ...]  # the beginning of a choice, in tokens


@dataclass(frozen=True, slots=True)
class Chain:
    """Tokens behind the prompt that are computed one after another, and what is read on the way.

    `asked` are contexts along the chain, none of which an earlier chain has, with a token that is wanted behind them.
    """

    tokens: Context
    asked: tuple[tuple[Context, int], ...]


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a row asks: chains behind its prompt and, with a prior, others behind that one's."""

    choices: tuple[Choice, ...]
    chains: tuple[Chain, ...]
    prior: Prior | None
    prior_chains: tuple[Chain, ...]

    @classmethod
    def of(cls, asked: str) -> "_Asked":
        choices, prior = choices_of(asked), prior_of(asked)
        own = tuple(chains([choice.token_ids for choice in choices]))
        return cls(choices, own, prior, () if prior is None else tuple(chains(prior.choice_ids)))


class ChooseTask(ReadingTask):
    """Labels for a job's rows."""

    def __init__(self, job: Job, *, shares_prefixes: bool) -> None:
        self.sampling = job.sampling
        self._prefix = job.output_prefix
        self._columns = columns(job)
        self._normalise: ChoiceNormalise = job.choice_normalise
        self._shares_prefixes = shares_prefixes
        self._asked = lru_cache(_KEPT)(_Asked.of)

    def requests(self, row: PlannedRow, output_ids: tuple[int, ...] = ()) -> tuple[Request, ...]:
        """What to run for a row: one request for each chain, in the order in which they share."""
        asked = self._asked(row.params or "")
        requests = list(self._behind(row.row_idx, row.token_ids, row.keep_len, asked.chains, 0))
        if asked.prior is not None:
            prompt = np.array(asked.prior.prompt_ids, np.int32)
            # Kept whole: it is the same for the next row.
            requests += self._behind(row.row_idx, prompt, len(prompt), asked.prior_chains, len(requests))
        return tuple(requests)

    def _behind(
        self, row_idx: int, prompt: TokenIds, keep_len: int, found: tuple[Chain, ...], branch: int
    ) -> Iterator[Request]:
        """Requests for chains behind a prompt, of which `keep_len` tokens are of use afterwards."""
        num_prompt = len(prompt)
        for at, chain in enumerate(found):
            positions = np.array([num_prompt - 1 + len(context) for context, _ in chain.asked], np.int32)
            wanted = np.array([token for _, token in chain.asked], np.int32)
            tokens = np.concatenate([prompt, np.array(chain.tokens, np.int32)])
            shared = shared_len(chain.tokens, found[at + 1].tokens) if at + 1 < len(found) else None
            kept = keep_len if shared is None else num_prompt + shared
            reads = TokenLogprobs(positions, wanted)
            yield Request(row_idx, tokens, self.sampling, kept, reads=reads, branch=branch + at)

    def fold(self, finished: Sequence[tuple[PlannedRow, tuple[Completion, ...]]]) -> pa.Table:
        """The result rows of finished rows and their duplicates; `columns`."""
        rows = [result for row, completions in finished for result in self._results(row, completions)]
        return prefixed(pa.Table.from_pylist(rows, schema=self._columns), self._prefix)

    def _results(self, row: PlannedRow, completions: tuple[Completion, ...]) -> list[dict[str, object]]:
        own = {} if any(one.error for one in completions) else self._chosen(row, completions)
        cached_tokens = row.shared_len if self._shares_prefixes else 0
        return list(result_rows(row, completions, own, cached_tokens, len(row.token_ids)))

    def _chosen(self, row: PlannedRow, completions: tuple[Completion, ...]) -> dict[str, object]:
        asked = self._asked(row.params or "")
        num_own = len(asked.chains)
        logprobs = _logprobs([choice.token_ids for choice in asked.choices], asked.chains, completions[:num_own])
        said: dict[str, object] = {}
        held = logprobs
        if asked.prior is not None:
            prior = _logprobs(asked.prior.choice_ids, asked.prior_chains, completions[num_own:])
            said, held = {_PRIOR_COLUMN[0]: prior.tolist()}, logprobs - prior
        scores = held / lengths(asked.choices, self._normalise)
        probs = np.exp(scores - scores.max())
        probs /= probs.sum()
        best = int(probs.argmax())
        return said | {
            "label": asked.choices[best].text,
            "label_prob": float(probs[best]),
            "choice_logprobs": logprobs.tolist(),
            "choice_probs": probs.tolist(),
        }


def columns(job: Job) -> pa.Schema:
    """The result's, known before anything runs."""
    return with_usual([*_COLUMNS, *([] if job.choice_prior is None else [_PRIOR_COLUMN])])


def _logprobs(
    choice_ids: Sequence[Context], found: tuple[Chain, ...], completions: Sequence[Completion]
) -> NDArray[np.float64]:
    """Of each choice, by what was read in the chains."""
    read: dict[tuple[Context, int], float] = {}
    for chain, completion in zip(found, completions, strict=True):
        assert completion.readings is not None, completion
        read |= zip(chain.asked, completion.readings[:, 0].tolist(), strict=True)
    return np.array([sum(read[step] for step in steps(ids)) for ids in choice_ids])


def steps(choice_ids: Context) -> list[tuple[Context, int]]:
    """The tokens of a choice, each with what of the choice stands before it."""
    return [(choice_ids[:end], token) for end, token in enumerate(choice_ids)]


def chains(choice_ids: Sequence[Context]) -> list[Chain]:
    """The trie of the choices: chains that together have every inner node, ordered so that neighbours share most."""
    asked: defaultdict[Context, list[int]] = defaultdict(list)
    for context, token in sorted({step for ids in choice_ids for step in steps(ids)}):
        asked[context].append(token)
    contexts = contexts_of(choice_ids)
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
