"""The rows that are searched with beams: their sequences go in lock-step, and are forked between two rounds.

A beam is a sequence like any other. A round of its row ends when each of the row's beams is computed to its end and has
said what may follow; a fork then shares its parent's blocks. A row that has to leave leaves whole, with one of its
beams to stand for it: when that one is computed again, the others are forked from it where they differ.

Why every search ends: a row has to leave only for an older one, and what it then loses is what was computed, never a
round that has ended, since beams keep their tokens. So the oldest row that runs loses nothing; it takes blocks from all
others, and alone it fits the pool with all its beams at their longest (`Scheduler.add`). Whenever its turn comes in a
step it gets nearer to the end of its round; and rows that a policy serves before it have only so much to compute until
they have found a token themselves, the oldest of them first. So rounds end, whatever was expected of them, and each
row has only so many.
"""

from dataclasses import dataclass

from batchrun.engine.beams import Beam, Beams, Child, Text
from batchrun.engine.block_manager import BlockManager
from batchrun.engine.endings import Ending
from batchrun.engine.request import TokenLogprob
from batchrun.engine.running import Running
from batchrun.engine.sequence import Sequence
from batchrun.engine.statistics import Counters


@dataclass(frozen=True, slots=True)
class Found:
    """The best text of a search, and why it ends."""

    token_ids: tuple[int, ...]
    ending: Ending


class BeamRows:
    """The searches of the rows that have begun."""

    def __init__(
        self, running: Running, blocks: BlockManager, counters: Counters, eos_token_ids: frozenset[int]
    ) -> None:
        self._running = running
        self._blocks = blocks
        self._counters = counters
        self._eos_token_ids = eos_token_ids
        self._searches: dict[tuple[int, int], Beams] = {}  # by their requests' keys

    def hear(self, sequence: Sequence, logprob: TokenLogprob) -> Found | None:
        """Takes in what may follow a beam that was computed to its end; the best text when that ends the search."""
        search = self._search_of(sequence)
        sequence.expect_nothing()
        search.hear(sequence, logprob)
        for beam in search.sequences:
            if not beam.block_table:  # the row had to leave, and is back
                self._enter(beam, sequence)
        if any(beam.gap for beam in search.sequences):
            return None
        children = search.advance()
        if not children:
            return self._as_found(search.found[0], sequence)
        before = search.sequences
        search.beams = self._go_on(children)
        for beam in before:
            if beam not in search.sequences:
                self._drop(beam)
        return None

    def end(self, sequence: Sequence) -> tuple[Sequence, ...]:
        """Forgets the search that a sequence belongs to, if it does; the other sequences of it."""
        search = self._searches.pop(sequence.request.key, None)
        return () if search is None else tuple(one for one in search.sequences if one is not sequence)

    def _search_of(self, sequence: Sequence) -> Beams:
        request = sequence.request
        assert request.beams is not None, "a row without beams"
        if request.key not in self._searches:
            self._searches[request.key] = Beams(sequence, request.beams, self._ends_of(sequence))
        return self._searches[request.key]

    def _ends_of(self, sequence: Sequence) -> frozenset[int]:
        sampling = sequence.request.sampling
        return (frozenset() if sampling.ignore_eos else self._eos_token_ids) | {*sampling.stop_token_ids}

    def _go_on(self, children: tuple[Child, ...]) -> list[Beam]:
        """The beams of the next round: a parent goes on as its likeliest child, forks of it as the others."""
        first_tokens: dict[Sequence, int] = {}
        beams = []
        for child in children:
            parent = child.parent
            if parent not in first_tokens:
                first_tokens[parent] = child.token
                beams.append(Beam(parent, child.score))
            else:
                fork = parent.fork()
                fork.append(child.token)
                self._enter(fork, parent)
                beams.append(Beam(fork, child.score))
        for parent, token in first_tokens.items():
            parent.append(token)
        return beams

    def _enter(self, beam: Sequence, parent: Sequence) -> None:
        """Makes a beam run that has no blocks, on those of another one of its row."""
        self._blocks.fork(parent, beam)
        parent.num_forks = max(0, parent.num_forks - 1)
        self._counters.recomputed_tokens += max(0, beam.num_lost - beam.num_computed)
        self._running.add(beam)

    def _drop(self, beam: Sequence) -> None:
        self._running.remove(beam)
        self._blocks.release(beam)
        beam.is_finished = True

    def _as_found(self, text: Text, sequence: Sequence) -> Found:
        last, sampling = text.token_ids[-1], sequence.request.sampling
        if last not in self._ends_of(sequence):
            return Found(text.token_ids, Ending("length"))
        is_eos = last in self._eos_token_ids and not sampling.ignore_eos
        return Found(text.token_ids, Ending("stop", None if is_eos else last))
