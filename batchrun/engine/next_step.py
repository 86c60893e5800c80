"""The step while it is put together: who gets how many tokens, and what is swapped and copied for it.

Gives a sequence blocks as it gives it tokens. Who should get how much is decided elsewhere.
"""

from batchrun.engine.block_manager import BlockManager
from batchrun.engine.request import TokenIds
from batchrun.engine.sequence import Sequence
from batchrun.engine.step import Item, ScheduledBatch, SwapIn, SwapOut


class NextStep:
    """A step of which `budget` tokens are left; `counts` are those that each sequence has got.

    A prompt is cut at a multiple of `alignment` tokens where that leaves it any.
    """

    def __init__(self, blocks: BlockManager, budget: int, alignment: int) -> None:
        self.budget = budget
        self.counts: dict[Sequence, int] = {}
        self.num_guessed: dict[Sequence, int] = {}
        self.preempted: list[Sequence] = []  # of one row
        self.places = 0  # left for rows that enter
        self.reserved = 0  # blocks the running sequences are expected to need still
        self.swap_outs: list[SwapOut] = []
        self.swap_ins: list[SwapIn] = []
        self._blocks = blocks
        self._alignment = alignment
        self._copied_from: dict[int, int] = {}  # destination slot -> source slot

    @property
    def is_empty(self) -> bool:
        """Whether nobody has got a token yet."""
        return not self.counts

    def rest(self, sequence: Sequence) -> int:
        """Tokens of the sequence that are not computed even after this step."""
        return sequence.gap - self.counts.get(sequence, 0)

    def end_of(self, sequence: Sequence, limit: int) -> int:
        """Where the sequence would be computed to, with `limit` tokens of this step at most."""
        end = sequence.num_computed + min(sequence.gap, limit)
        aligned = end - end % self._alignment
        return aligned if sequence.num_computed < aligned and end < sequence.num_tokens else end

    def extend(self, sequence: Sequence, limit: int) -> None:
        """Gives the sequence up to `limit` tokens of this step, what it has got so far included, as far as there are
        blocks for them."""
        end = self.end_of(sequence, limit)
        if sequence.request.beams is not None and end > sequence.num_computed:
            self.copy(self._blocks.part(sequence))
        end = self._blocks.grow(sequence, end)
        count = end - sequence.num_computed
        if count > 0:
            self.budget -= count - self.counts.get(sequence, 0)
            self.counts[sequence] = count
            self._blocks.publish(sequence, min(end, sequence.prompt_len))

    def guess(self, sequence: Sequence, tokens: TokenIds) -> None:
        """Adds a guess of what follows a sequence that is computed to its end in this step, as far as there are free
        blocks for it."""
        num_free = self._blocks.pool.num_free * self._blocks.block_size
        end = self._blocks.grow(sequence, sequence.num_tokens + min(len(tokens), num_free))
        num_guessed = end - sequence.num_tokens
        sequence.guess(tokens[:num_guessed])
        self.num_guessed[sequence] = num_guessed
        self.counts[sequence] += num_guessed
        self.budget -= num_guessed

    def copy(self, copies: list[tuple[int, int]]) -> None:
        """Adds slot copies; a source that is itself a copy of this step is replaced by that one's source."""
        for source, destination in copies:
            self._copied_from[destination] = self._copied_from.get(source, source)

    def freeze(self) -> ScheduledBatch:
        """The step as it is to be carried out."""
        items = tuple(
            Item(
                sequence,
                sequence.num_computed,
                count,
                samples=count == sequence.gap and sequence.request.reads is None,
                num_draft=self.num_guessed.get(sequence, 0),
                read_from=sequence.read_end,
            )
            for sequence, count in self.counts.items()
        )
        copies = tuple((source, destination) for destination, source in self._copied_from.items())
        return ScheduledBatch(items, tuple(self.swap_outs), tuple(self.swap_ins), copies)
