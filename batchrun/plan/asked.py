"""What a row asks beyond its prompt, as it travels through a plan: text in the place of sampling parameters.

Written when a row is planned and read when it runs; canonical, so that equal rows compare equal.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from batchrun.plan.params import merged

if TYPE_CHECKING:
    from batchrun.engine.request import TokenIds
    from batchrun.job import Job

_KEPT = 4096  # distinct texts whose meaning is remembered


@dataclass(frozen=True, slots=True)
class Choice:
    """A text to choose, and its tokens behind the prompt."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prior:
    """A prompt's tokens, and behind it those of each choice; what the choices' probabilities are held against."""

    prompt_ids: tuple[int, ...]
    choice_ids: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Size:
    """Tokens that a row needs room for behind those planned for it, how many of them one sequence has at most, and
    those whose probability the row asks for. `beside_len` has the longest sequence that is not behind them."""

    output_len: int
    sequence_len: int
    num_asked: int
    beside_len: int = 0


def asked_target(num_tokens: int) -> str:
    """The last `num_tokens` of the row's tokens are to be scored."""
    return json.dumps({"target_tokens": num_tokens})


def target_tokens(asked: str) -> int:
    """What `asked_target` was given."""
    return int(json.loads(asked)["target_tokens"])


def asked_choices(texts: tuple[str, ...], token_ids: "list[TokenIds]", prior: Prior | None) -> str:
    """One of these texts is to be chosen; `token_ids` are theirs, in that order."""
    pairs = [[text, ids.tolist()] for text, ids in zip(texts, token_ids, strict=True)]
    held = {} if prior is None else {"prior": [prior.prompt_ids, prior.choice_ids]}
    return json.dumps({"choices": pairs, **held}, ensure_ascii=False, separators=(",", ":"))


def choices_of(asked: str) -> tuple[Choice, ...]:
    """What `asked_choices` was given."""
    return tuple(Choice(text, tuple(ids)) for text, ids in json.loads(asked)["choices"])


def prior_of(asked: str) -> Prior | None:
    """What `asked_choices` was given."""
    found = json.loads(asked).get("prior")
    return None if found is None else Prior(tuple(found[0]), tuple(map(tuple, found[1])))


def contexts_of(choice_ids: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The beginnings of the choices behind which a token is asked for, sorted: the inner nodes of their trie."""
    return sorted({ids[:end] for ids in choice_ids for end in range(len(ids))})


def size_of(job: "Job") -> Callable[[str | None], Size]:
    """What a row's text asks for, under this job's task."""
    match job.task:
        case "generate":
            sampling = partial(merged, job.sampling)
            return lru_cache(_KEPT)(lambda asked: _size_of_output(sampling(asked).max_tokens))
        case "score":
            return lru_cache(_KEPT)(lambda asked: Size(0, 0, target_tokens(asked or "")))
        case "choose":
            return lru_cache(_KEPT)(_size_of_choices)
        case "embed":
            return lambda asked: Size(0, 0, 0)


def is_foldable(job: "Job") -> Callable[[str | None], bool]:
    """Whether rows with equal tokens and this text have equal answers; a sampled row has its own randomness."""
    if job.task != "generate":
        return lambda asked: True
    sampling = partial(merged, job.sampling)
    return lru_cache(_KEPT)(lambda asked: sampling(asked).is_greedy)


def _size_of_output(max_tokens: int) -> Size:
    return Size(max_tokens, max_tokens, 0)


def _size_of_choices(asked: str | None) -> Size:
    choice_ids = [choice.token_ids for choice in choices_of(asked or "")]
    lengths = list(map(len, choice_ids))
    # The prompt's own end is one of the contexts, and is computed with the prompt.
    size = Size(len(contexts_of(choice_ids)) - 1, max(lengths) - 1, sum(lengths))
    if (prior := prior_of(asked or "")) is None:
        return size
    beside = list(map(len, prior.choice_ids))
    # Its prompt is the same for all rows, but its end, where something is read, is computed for each.
    return replace(
        size,
        output_len=size.output_len + len(contexts_of(prior.choice_ids)),
        num_asked=size.num_asked + sum(beside),
        beside_len=len(prior.prompt_ids) + max(beside) - 1,
    )
