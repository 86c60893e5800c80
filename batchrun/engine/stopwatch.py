"""When rows come, begin and get their tokens. Times are seconds of the caller's clock; nothing is decided from them."""

from collections import Counter
from heapq import heappop, heappush

from batchrun.engine.request import Completion, Request
from batchrun.engine.step import ScheduledBatch
from batchrun.latency import NUM_SLOWEST, Latencies, RowTime

_Key = tuple[int, int]  # a request's


class Stopwatch:
    """Measures the latencies of the requests in an engine; one is known by its `key` until it is forgotten."""

    def __init__(self) -> None:
        self._measured = Latencies()
        self._queued_at: dict[_Key, float] = {}  # rows that nothing is computed of
        self._arrived_at: dict[_Key, float] = {}  # rows without a token
        self._token_at: dict[_Key, float] = {}  # when a row got its latest token
        self._num_tokens: dict[_Key, int] = {}  # that a row had then
        self._begun: dict[_Key, tuple[float, float]] = {}  # when a row began, and how long it was queued before
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
        self._queued_at[request.key] = now
        self._num_tokens[request.key] = len(request.output_ids)
        if not request.output_ids:
            self._arrived_at[request.key] = now

    def begin(self, batch: ScheduledBatch, now: float) -> None:
        """A step is about to be computed."""
        for item in batch.items:
            key = item.sequence.request.key
            queued_at = self._queued_at.pop(key, None)
            if queued_at is not None:
                self._begun[key] = now, now - queued_at

    def end(self, batch: ScheduledBatch, now: float) -> None:
        """A step's tokens are taken in. Several that a row gets at once share the time since the one before."""
        gaps = Counter[float]()  # most rows got their last token at the same time
        for item in batch.items:
            key, num_tokens = item.sequence.request.key, len(item.sequence.output_ids)
            num_new = num_tokens - self._num_tokens.get(key, num_tokens)
            if num_new <= 0:
                continue
            arrived_at, token_at = self._arrived_at.pop(key, None), self._token_at.get(key)
            if arrived_at is not None:
                # Both at once, so that both are of the same rows.
                self._measured.queue.add(self._begun[key][1])
                self._measured.first_token.add(now - arrived_at)
            elif token_at is not None:
                gaps[(now - token_at) / num_new] += num_new
            self._token_at[key], self._num_tokens[key] = now, num_tokens
        for gap, times in gaps.items():
            self._measured.per_token.add(gap, times)

    def finish(self, completion: Completion, now: float) -> None:
        """The row has ended."""
        row_idx = completion.row_idx
        began, queue_s = self._begun.get(completion.key, (now, 0.0))
        run_s = now - began
        if completion.readings is not None:
            self._measured.queue.add(queue_s)
        # Most rows are none of the slowest, and cost no more than this comparison.
        if len(self._slowest) < NUM_SLOWEST or run_s > self._slowest[0].run_s:
            heappush(
                self._slowest, RowTime(run_s, queue_s, row_idx, completion.prompt_tokens, len(completion.token_ids))
            )
        if len(self._slowest) > NUM_SLOWEST:
            heappop(self._slowest)
        self.forget(completion.key)

    def forget(self, key: _Key) -> None:
        """The request was taken out of the engine."""
        for known in (self._queued_at, self._arrived_at, self._token_at, self._num_tokens, self._begun):
            known.pop(key, None)
