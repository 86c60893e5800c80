"""When rows come, begin and get their tokens. Times are seconds of the caller's clock; nothing is decided from them."""

from collections import Counter
from heapq import heappop, heappush

from batchrun.engine.request import Completion, Request
from batchrun.engine.step import ScheduledBatch
from batchrun.latency import NUM_SLOWEST, Latencies, RowTime


class Stopwatch:
    """Measures the latencies of the rows in an engine; a row is known by its `row_idx` until it is forgotten."""

    def __init__(self) -> None:
        self._measured = Latencies()
        self._queued_at: dict[int, float] = {}  # rows that nothing is computed of
        self._arrived_at: dict[int, float] = {}  # rows without a token
        self._token_at: dict[int, float] = {}  # when a row got its latest token
        self._num_tokens: dict[int, int] = {}  # that a row had then
        self._begun: dict[int, tuple[float, float]] = {}  # when a row began, and how long it was queued before
        self._slowest: list[RowTime] = []  # a heap: the quickest of them first

    @property
    def latencies(self) -> Latencies:
        """A copy of what is measured so far."""
        return self._measured + Latencies()

    @property
    def slowest(self) -> tuple[RowTime, ...]:
        """The rows that took longest from their first step to their end; the slowest first."""
        return tuple(sorted(self._slowest, reverse=True))

    def arrive(self, request: Request, now: float) -> None:
        """The engine was given a row; one that is resumed has had its first token."""
        self._queued_at[request.row_idx] = now
        self._num_tokens[request.row_idx] = len(request.output_ids)
        if not request.output_ids:
            self._arrived_at[request.row_idx] = now

    def begin(self, batch: ScheduledBatch, now: float) -> None:
        """A step is about to be computed."""
        for item in batch.items:
            row_idx = item.sequence.request.row_idx
            queued_at = self._queued_at.pop(row_idx, None)
            if queued_at is not None:
                self._measured.queue.add(now - queued_at)
                self._begun[row_idx] = now, now - queued_at

    def end(self, batch: ScheduledBatch, now: float) -> None:
        """A step's tokens are taken in. Several that a row gets at once share the time since the one before."""
        gaps = Counter[float]()  # most rows got their last token at the same time
        for item in batch.items:
            row_idx, num_tokens = item.sequence.request.row_idx, len(item.sequence.output_ids)
            num_new = num_tokens - self._num_tokens.get(row_idx, num_tokens)
            if num_new <= 0:
                continue
            arrived_at, token_at = self._arrived_at.pop(row_idx, None), self._token_at.get(row_idx)
            if arrived_at is not None:
                self._measured.first_token.add(now - arrived_at)
            elif token_at is not None:
                gaps[(now - token_at) / num_new] += num_new
            self._token_at[row_idx], self._num_tokens[row_idx] = now, num_tokens
        for gap, times in gaps.items():
            self._measured.per_token.add(gap, times)

    def finish(self, completion: Completion, now: float) -> None:
        """The row has ended."""
        row_idx = completion.row_idx
        began, queue_s = self._begun.get(row_idx, (now, 0.0))
        run_s = now - began
        # Most rows are none of the slowest, and cost no more than this comparison.
        if len(self._slowest) < NUM_SLOWEST or run_s > self._slowest[0].run_s:
            heappush(
                self._slowest, RowTime(run_s, queue_s, row_idx, completion.prompt_tokens, len(completion.token_ids))
            )
        if len(self._slowest) > NUM_SLOWEST:
            heappop(self._slowest)
        self.forget(row_idx)

    def forget(self, row_idx: int) -> None:
        """The row was taken out of the engine."""
        for known in (self._queued_at, self._arrived_at, self._token_at, self._num_tokens, self._begun):
            known.pop(row_idx, None)
