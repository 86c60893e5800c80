"""A request while it runs: the one busy mutable object of the engine.

A sequence has tokens and knows how many of them have their keys and values in the cache. A prompt chunk, a
decode token, a prefix hit and a resumed row differ only in these two numbers. A token that a device is about to
sample counts already, though nobody on the host knows which one it is.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchrun.engine.grammar import Matcher
from batchrun.engine.radix import Node
from batchrun.engine.request import PooledHidden, Request, TokenIds, TokenLogprob, TokenLogprobs

PENDING = -1  # stands for a token that is being sampled


@dataclass(frozen=True, slots=True)
class Swapped:
    """Where a preempted sequence's keys and values wait on the host.

    Block `first_block + i` of the sequence is in `host_slots[i]`; the blocks before it were shared with running
    sequences and are expected to be in the tree still.
    """

    first_block: int
    host_slots: tuple[int, ...]
    num_computed: int


class Sequence:
    """Tokens, how far they are computed, and the blocks that hold them.

    `block_table[i]` is the pool block of tokens `i * block_size ...`; it only grows while the sequence runs.
    `node` is the last tree node of its own chain of published blocks and `num_published` that chain's length;
    `node` is None once another sequence has published the same tokens first, so that there is nothing to add.
    `num_lost` tokens had been computed when the sequence was last preempted. The first `num_known` tokens are known;
    behind them are those that steps in flight sample. Between a step and its end, `num_draft` tokens behind the known
    ones are guesses that the step will prove or not. `logprobs` are those of the tokens generated, if asked for.
    `state_slot` is where its state is kept, of a model that has states.
    `is_answering`: it does not reason (any more). `text_len` is where a stop string begins in its text. `matcher` has
    accepted the known generated tokens, if there is a grammar to follow. Of a sequence that is read, positions below
    `read_end` are in steps that were scheduled, and `readings` holds what came of those that ended, up to `taken_end`.
    Of beams, which have their row's arrival, `num_forks` more are expected to come from this one.
    """

    __slots__ = (
        "_tokens",
        "arrival",
        "block_table",
        "cached_tokens",
        "is_answering",
        "is_finished",
        "is_last_reader",
        "logprobs",
        "matcher",
        "node",
        "num_computed",
        "num_draft",
        "num_forks",
        "num_known",
        "num_lost",
        "num_preemptions",
        "num_published",
        "num_tokens",
        "read_end",
        "readings",
        "request",
        "state_slot",
        "swapped",
        "taken_end",
        "text_len",
    )

    def __init__(self, request: Request, arrival: int) -> None:
        self.request = request
        self.arrival = arrival
        self._tokens: TokenIds = np.empty(request.max_len + 1, dtype=np.int32)
        self._tokens[: len(request.token_ids)] = request.token_ids
        self._tokens[len(request.token_ids) : len(request.token_ids) + len(request.output_ids)] = request.output_ids
        self.num_tokens = self.num_known = len(request.token_ids) + len(request.output_ids)
        self.num_draft = 0
        self.logprobs: list[TokenLogprob] = []
        self.is_answering = request.reasoning_end is None
        self.text_len: int | None = None
        self.is_finished = False
        self.num_computed = 0
        self.cached_tokens = 0
        self.num_lost = 0
        self.num_preemptions = 0
        self.block_table: list[int] = []
        self.state_slot: int | None = None
        self.node: Node | None = None
        self.num_published = 0
        self.is_last_reader = False
        self.swapped: Swapped | None = None
        self.read_end = self.taken_end = 0
        self.readings: list[NDArray[np.float64]] = []
        self.matcher: Matcher | None = _resumed(request)
        self.num_forks = request.num_sequences - 1

    def fork(self) -> "Sequence":
        """Another sequence of the row with the same known tokens; nothing of it is computed."""
        fork = Sequence(self.request, self.arrival)
        fork.num_tokens = fork.num_known = self.num_known
        fork._tokens[: self.num_known] = self._tokens[: self.num_known]
        fork.is_last_reader = self.is_last_reader
        fork.num_forks = 0
        return fork

    @property
    def tokens(self) -> TokenIds:
        """Prompt and output so far, `PENDING` where not known; int32 [num_tokens]; a view, not to be written."""
        return self._tokens[: self.num_tokens]

    @property
    def prompt_len(self) -> int:
        return len(self.request.token_ids)

    @property
    def output_len(self) -> int:
        """Tokens generated so far, those being sampled included."""
        return self.num_tokens - self.prompt_len

    @property
    def output_ids(self) -> TokenIds:
        """The tokens known to be generated; int32 [num_known - prompt_len]; a view, not to be written."""
        return self._tokens[self.prompt_len : self.num_known]

    @property
    def gap(self) -> int:
        """Tokens whose keys and values are not in the cache yet; 1 while decoding."""
        return self.num_tokens - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Whether the next token to compute is the last one, and generated; that of a prompt's end is not."""
        return self.gap == 1 and self.num_computed >= self.prompt_len

    @property
    def has_pending(self) -> bool:
        return self.num_known < self.num_tokens

    @property
    def is_full(self) -> bool:
        """Whether it has as many tokens as it may have; the last ones may be pending. Of one that is read: whether all
        of it is computed, or will be by the steps in flight."""
        if self.request.reads is not None:
            return self.gap == 0
        return self.output_len >= self.request.sampling.max_tokens

    @property
    def shareable(self) -> TokenIds:
        """The tokens that may be shared, and the next one; a view."""
        return self.tokens[: self.request.shareable_len(self.num_tokens, self.read_end) + 1]

    @property
    def pooled(self) -> NDArray[np.float64]:
        """What was read of it; see `Completion`."""
        reads = self.request.reads
        if isinstance(reads, TokenLogprobs):
            return np.concatenate(self.readings)
        assert isinstance(reads, PooledHidden), "nothing was to be read"
        total: NDArray[np.float64] = np.sum(self.readings, axis=0)
        return total / self.num_tokens if reads.pooling == "mean" else total

    def take(self, reading: NDArray[np.float64], end: int) -> None:
        """What a step has read up to the position `end`."""
        self.readings.append(reading)
        self.taken_end = max(self.taken_end, end)

    def guess(self, tokens: TokenIds) -> None:
        """Appends a draft of what may follow; nothing may be pending."""
        assert not self.has_pending, "a guess behind a token that nobody knows"
        self._tokens[self.num_tokens : self.num_tokens + len(tokens)] = tokens
        self.num_tokens += len(tokens)
        self.num_draft = len(tokens)

    def expect(self) -> None:
        """One more token is being sampled."""
        self._tokens[self.num_tokens] = PENDING
        self.num_tokens += 1

    def expect_nothing(self) -> None:
        """What was being sampled is not wanted; the known tokens stay computed."""
        self.num_tokens = self.num_known

    def append(self, token: int) -> None:
        """One more token, which is known at once."""
        self.expect()
        self.resolve(token)

    def resolve(self, token: int) -> None:
        """The first token that was not known turned out to be this one."""
        assert self.has_pending, "a token that nobody expects"
        self._tokens[self.num_known] = token
        self.num_known += 1
        if self.matcher is not None:
            self.matcher.accept(token)

    def is_guessed(self, token: int) -> bool:
        """Whether the draft has `token` next."""
        return self.num_draft > 0 and int(self._tokens[self.num_known]) == token

    def forget_flight(self) -> None:
        """What was being sampled, guessed or read comes to nothing."""
        self.num_tokens = self.num_known
        self.num_draft = 0
        self.read_end = self.taken_end

    def start_over(self) -> None:
        """Nothing of it is computed any more, nor will be by what is in flight."""
        self.forget_flight()
        self.num_lost = max(self.num_lost, min(self.num_computed, self.num_known))
        self.num_computed = 0
        self.num_preemptions += 1

    def drop_draft(self) -> None:
        """Forgets what is not known: it is computed again, as something else."""
        self.num_tokens = self.num_known
        self.num_computed = self.num_known - 1
        self.num_draft = 0


def _resumed(request: Request) -> Matcher | None:
    """Where the request's output stands in its grammar."""
    if request.grammar is None:
        return None
    matcher = request.grammar.start()
    for token in request.output_ids:
        matcher.accept(token)
    return matcher
