"""When rows come, begin and get their tokens. Times are seconds of the caller's clock; nothing is decided from them."""

from collections import Counter

from batchrun.engine.request import Request
from batchrun.engine.step import NO_TOKEN, Sampled, ScheduledBatch
from batchrun.latency import Latencies


class Stopwatch:
    """Measures the latencies of the rows in an engine; a row is known by its `row_idx` until it is forgotten."""

    def __init__(self) -> None:
        self._measured = Latencies()
        self._queued_at: dict[int, float] = {}  # rows that nothing is computed of
        self._arrived_at: dict[int, float] = {}  # rows without a token
        self._token_at: dict[int, float] = {}  # when a row got its latest token

    @property
    def latencies(self) -> Latencies:
        """A copy of what is measured so far."""
        return self._measured + Latencies()

    def arrive(self, request: Request, now: float) -> None:
        """The engine was given a row; one that is resumed has had its first token."""
        self._queued_at[request.row_idx] = now
        if not request.output_ids:
            self._arrived_at[request.row_idx] = now

    def begin(self, batch: ScheduledBatch, now: float) -> None:
        """A step is about to be computed."""
        for item in batch.items:
            queued_at = self._queued_at.pop(item.sequence.request.row_idx, None)
            if queued_at is not None:
                self._measured.queue.add(now - queued_at)

    def end(self, batch: ScheduledBatch, sampled: Sampled, now: float) -> None:
        """A step's tokens are known; those of rows that had ended before count for nothing."""
        gaps = Counter[float]()  # most rows got their last token at the same time
        for item, token in zip(batch.sampled, sampled.tokens.tolist(), strict=True):
            row_idx = item.sequence.request.row_idx
            if item.sequence.is_finished or token == NO_TOKEN:
                continue
            arrived_at, token_at = self._arrived_at.pop(row_idx, None), self._token_at.get(row_idx)
            if arrived_at is not None:
                self._measured.first_token.add(now - arrived_at)
            elif token_at is not None:
                gaps[now - token_at] += 1
            self._token_at[row_idx] = now
        for gap, times in gaps.items():
            self._measured.per_token.add(gap, times)

    def forget(self, row_idx: int) -> None:
        """The row has ended, or was taken out of the engine."""
        for times in (self._queued_at, self._arrived_at, self._token_at):
            times.pop(row_idx, None)
