"""A request while it runs: the one busy mutable object of the engine.

A sequence has tokens and knows how many of them have their keys and values in the cache. A prompt chunk, a
decode token, a prefix hit and a resumed row differ only in these two numbers.
"""

from dataclasses import dataclass

import numpy as np

from batchrun.engine.radix import Node
from batchrun.engine.request import Request, TokenIds


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
    `num_lost` tokens had been computed when the sequence was last preempted.
    """

    __slots__ = (
        "_tokens",
        "arrival",
        "block_table",
        "cached_tokens",
        "is_last_reader",
        "node",
        "num_computed",
        "num_lost",
        "num_preemptions",
        "num_published",
        "num_tokens",
        "request",
        "swapped",
    )

    def __init__(self, request: Request, arrival: int) -> None:
        self.request = request
        self.arrival = arrival
        self._tokens: TokenIds = np.empty(request.max_len + 1, dtype=np.int32)
        self._tokens[: len(request.token_ids)] = request.token_ids
        self.num_tokens = len(request.token_ids)
        for token in request.output_ids:
            self.append(token)
        self.num_computed = 0
        self.cached_tokens = 0
        self.num_lost = 0
        self.num_preemptions = 0
        self.block_table: list[int] = []
        self.node: Node | None = None
        self.num_published = 0
        self.is_last_reader = False
        self.swapped: Swapped | None = None

    @property
    def tokens(self) -> TokenIds:
        """Prompt and output so far; int32 [num_tokens]; a view, not to be written."""
        return self._tokens[: self.num_tokens]

    @property
    def prompt_len(self) -> int:
        return len(self.request.token_ids)

    @property
    def output_len(self) -> int:
        return self.num_tokens - self.prompt_len

    @property
    def output_ids(self) -> TokenIds:
        """The tokens generated so far; int32 [output_len]; a view, not to be written."""
        return self._tokens[self.prompt_len : self.num_tokens]

    @property
    def gap(self) -> int:
        """Tokens whose keys and values are not in the cache yet; 1 while decoding."""
        return self.num_tokens - self.num_computed

    def append(self, token: int) -> None:
        self._tokens[self.num_tokens] = token
        self.num_tokens += 1
