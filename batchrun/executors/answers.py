"""What workers have handed in, until it is in the job folder: answers, and the tokens of rows that have none yet."""

import time
from collections import defaultdict
from collections.abc import Mapping

import pyarrow as pa

from batchrun.executors.messages import Answered, unpacked
from batchrun.ledger import Ledger
from batchrun.tally import Tally


class Answers:
    """Counts rows as they are answered; keeps them for good when told to. `tokens` are what unfinished rows have."""

    def __init__(self, ledger: Ledger, tally: Tally, error_column: str) -> None:
        self._ledger = ledger
        self._tally = tally
        self._error_column = error_column
        self._answered: defaultdict[int, list[Answered]] = defaultdict(list)  # by unit
        self.tokens = dict(ledger.partial)
        self._has_new_tokens = False
        self.is_cut_off = False  # a save has failed
        self.checkpoint_s = 0.0  # spent on saving

    def take(self, answered: Answered) -> None:
        """Answers of rows that are done with."""
        self._answered[answered.unit].append(answered)
        errors = unpacked(answered.table).column(self._error_column)
        self._tally.count(len(errors), len(errors) - errors.null_count)
        for row in answered.rows:
            self.tokens.pop(row, None)

    def take_tokens(self, rows: Mapping[int, tuple[int, ...]]) -> None:
        """What these rows have generated so far."""
        self.tokens |= rows
        self._has_new_tokens = True

    def save(self) -> None:
        """Commits what was answered, then keeps what unfinished rows have.

        Raises:
            StoppedEarly: another process has taken the job over.
            StorageFailed: the disk failed.
        """
        if self.is_cut_off:
            return
        began = time.perf_counter()
        # Until it has succeeded: if it fails, one more try would only hide why.
        self.is_cut_off = True
        for unit, answers in self._answered.items():
            rows = [row for answered in answers for row in answered.rows]
            self._ledger.commit(unit, rows, pa.concat_tables([unpacked(answered.table) for answered in answers]))
        self._answered.clear()
        if self._has_new_tokens and self.tokens:
            self._ledger.save_unfinished(self.tokens)
            self._has_new_tokens = False
        self.is_cut_off = False
        self.checkpoint_s += time.perf_counter() - began
