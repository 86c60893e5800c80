"""Finds stop strings in what a sequence has generated, also across token borders, without decoding it all again."""

from collections.abc import Callable
from dataclasses import dataclass

from batchrun.engine.request import TokenIds
from batchrun.engine.sequence import Sequence

Decode = Callable[[TokenIds], str]

_UNFINISHED = "\ufffd"  # what a decoder shows of a character whose bytes are not complete yet


@dataclass(slots=True)
class _Tail:
    """Output tokens up to `read` are in `text`; decoding starts at `start`, so that spaces come out as in the whole."""

    start: int = 0
    read: int = 0
    text: str = ""


class StopStrings:
    """Follows the text of running sequences that have stop strings."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._tails: dict[int, _Tail] = {}

    def find(self, sequence: Sequence) -> str | None:
        """The stop string that the newest tokens complete; of several the one that begins first."""
        tail = self._tails.setdefault(sequence.request.row_idx, _Tail())
        ids = sequence.output_ids
        before = self._decode(ids[tail.start : tail.read])
        after = self._decode(ids[tail.start :])
        if len(after) <= len(before) or after.endswith(_UNFINISHED):
            return None
        stops = sequence.request.sampling.stop
        searched_from = max(0, len(tail.text) - max(map(len, stops)) + 1)
        tail.text += after[len(before) :]
        tail.start, tail.read = tail.read, len(ids)
        found = [(at, stop) for stop in stops if (at := tail.text.find(stop, searched_from)) >= 0]
        return min(found)[1] if found else None

    def forget(self, row_idx: int) -> None:
        """Drops what is kept of a finished row."""
        self._tails.pop(row_idx, None)
