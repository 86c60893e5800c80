"""Finds stop strings in what a sequence has generated, also across token borders, without decoding it all again.

Of a sequence that reasons first it looks for the end of that, and for stop strings behind it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from batchrun.engine.request import TokenIds
from batchrun.engine.sequence import Sequence

Decode = Callable[[TokenIds], str]

_UNFINISHED = "\ufffd"  # what a decoder shows of a character whose bytes are not complete yet


@dataclass(slots=True)
class _Tail:
    """Output tokens up to `read` are in `text`; decoding starts at `start`, so that spaces come out as in the whole.

    The answer begins at character `answer` of the text, once it has begun.
    """

    start: int = 0
    read: int = 0
    text: str = ""
    answer: int = 0


class StopStrings:
    """Follows the text of running sequences that have stop strings, or reason first."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._tails: dict[int, _Tail] = {}

    def find(self, sequence: Sequence) -> str | None:
        """The stop string that the newest tokens complete; of several the one that begins first.

        Notes at the sequence where it begins, and whether its answer has begun.
        """
        row_idx, ids = sequence.request.row_idx, sequence.output_ids
        if row_idx not in self._tails:
            self._tails[row_idx] = self._read_before(sequence)
        tail = self._tails[row_idx]
        before = self._decode(ids[tail.start : tail.read])
        after = self._decode(ids[tail.start :])
        if len(after) <= len(before) or after.endswith(_UNFINISHED):
            return None
        num_before = len(tail.text)
        tail.text += after[len(before) :]
        tail.start, tail.read = tail.read, len(ids)
        end = sequence.request.reasoning_end
        if not sequence.is_answering and end is not None:
            at = tail.text.find(end, max(0, num_before - len(end) + 1))
            if at < 0:
                return None
            sequence.is_answering, tail.answer = True, at + len(end)
        found = [
            (at, stop)
            for stop in sequence.request.sampling.stop
            if (at := tail.text.find(stop, max(tail.answer, num_before - len(stop) + 1))) >= 0
        ]
        if not found:
            return None
        sequence.text_len, stop = min(found)
        return stop

    def _read_before(self, sequence: Sequence) -> _Tail:
        """What was read of a sequence that goes on from saved tokens: what is complete in them has ended nothing."""
        saved = sequence.output_ids[: len(sequence.request.output_ids)]
        text = self._decode(saved)
        while text.endswith(_UNFINISHED):
            saved = saved[:-1]
            text = self._decode(saved)
        tail, end = _Tail(max(len(saved) - 1, 0), len(saved), text), sequence.request.reasoning_end
        if end is not None and (at := text.find(end)) >= 0:
            sequence.is_answering, tail.answer = True, at + len(end)
        return tail

    def forget(self, row_idx: int) -> None:
        """Drops what is kept of a finished row."""
        self._tails.pop(row_idx, None)
