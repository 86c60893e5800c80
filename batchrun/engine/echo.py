"""A model without weights, to rehearse a job and to test everything around a model.

What it keeps as keys and values are the token and its position themselves. To choose the next token it reads the
whole context back through the block table and hashes it, so a wrong block, a stale prefix, a lost swap or a
position off by one changes the answer, exactly and without floats. It answers in lower-case letters.
"""

import zlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from batchrun.engine.allowed import allowed_tokens, token_lists
from batchrun.engine.host_memory import mapped
from batchrun.engine.request import PooledHidden, TokenIds, TokenLogprob, TokenLogprobs
from batchrun.engine.sequence import PENDING, Sequence
from batchrun.engine.step import NO_TOKEN, Ended, Item, Sampled, ScheduledBatch

FIRST_BYTE = 3  # ids below are padding, beginning and end of text
EOS_TOKEN_ID = 2
HIDDEN_SIZE = 4
_LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz     ", dtype=np.uint8)
_UNREAD = -1


class EchoRunner:
    """Implements `Runner` on two integer arrays; a block costs 8 bytes a token.

    A row's length is decided by the hash as well: each token is the end of text with probability
    1 / `mean_output_len`. With `overlaps` it takes pending tokens from what it sampled last, as a device would. With
    `num_state_slots` it goes by the hash of what a sequence has computed so far, which is its state. Host slots are in
    the memory of the `swap_descriptor`, if there is one.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_host_slots: int = 0,
        mean_output_len: int = 24,
        *,
        overlaps: bool = False,
        num_free_tokens: int = 0,
        num_state_slots: int = 0,
        swap_descriptor: int | None = None,
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.num_host_slots = num_host_slots
        self.num_state_slots = num_state_slots
        self.block_bytes = 8 * block_size
        self.block_format = f"{self.block_bytes} bytes"
        self.is_gpu = False
        self.overlaps = overlaps
        self.num_free_tokens = num_free_tokens
        self._pool = np.full((num_blocks, block_size), _UNREAD, dtype=np.int64)
        self._host = _host_slots(num_host_slots, block_size, swap_descriptor)
        self._digests = [_UNREAD] * num_state_slots
        self._mean_output_len = mean_output_len
        self._sampled: dict[Sequence, int] = {}  # by the last step

    def launch(self, batch: ScheduledBatch) -> Ended:
        """Swaps, writes every token of the step, copies slots, and only then reads."""
        for out in batch.swap_outs:
            self._host[list(out.host_slots)] = self._pool[list(out.blocks)]
        for back in batch.swap_ins:
            self._pool[list(back.blocks)] = self._host[list(back.host_slots)]
        slots = self._pool.reshape(-1)
        for item in batch.items:
            self._write(slots, item)
        for source, destination in batch.slot_copies:
            slots[destination] = slots[source]
        allowed = _allowed(batch)
        chosen = [(item.sequence, self._next(item, allowed.get(at))) for at, item in enumerate(batch.sampled)]
        self._sampled = dict(chosen)
        tokens = np.array([token for _, token in chosen], dtype=np.int32)
        logprobs = tuple(self._logprob(item, token) for item, (_, token) in zip(batch.sampled, chosen, strict=True))
        readings = tuple(self._read(item) for item in batch.items) if batch.reads else ()
        swapped = batch.num_swapped * self.block_bytes
        return Ended(
            Sampled(tokens, swapped, logprobs=tuple(one for one in logprobs if one is not None), readings=readings)
        )

    def wait_for_copies(self) -> None:
        """There are none."""

    def close(self) -> None:
        """There is nothing to end."""

    def _write(self, slots: NDArray[np.int64], item: Item) -> None:
        positions = np.arange(item.start, item.end)
        blocks = np.asarray(item.sequence.block_table)[positions // self.block_size]
        tokens = item.context[item.start :].copy()
        if tokens[-1] == PENDING:
            tokens[-1] = self._sampled[item.sequence]
        written = entries(tokens, item.start)
        slots[blocks * self.block_size + positions % self.block_size] = written
        if (slot := item.sequence.state_slot) is not None:
            self._digests[slot] = zlib.crc32(written.tobytes(), self._digests[slot] if item.start else 0)

    def _read(self, item: Item) -> NDArray[np.float64]:
        context = self._pool[item.sequence.block_table].reshape(-1)[: item.end]
        return read(context, item)

    def _next(self, item: Item, allowed: NDArray[np.int64] | None) -> int:
        if (slot := item.sequence.state_slot) is not None:
            return _chosen(self._digests[slot], self._mean_output_len, allowed)
        read = self._pool[item.sequence.block_table].reshape(-1)[: item.end]
        return choose(read, self._mean_output_len, allowed)

    def _logprob(self, item: Item, token: int) -> TokenLogprob | None:
        """This model has no doubts, except where beams ask for them."""
        num = item.sequence.request.num_logprobs
        if num is None:
            return None
        if item.sequence.request.beams is None:
            return TokenLogprob(0.0, 1, *(((token,), (0.0,)) if num else ()))
        context = self._pool[item.sequence.block_table].reshape(-1)[: item.end]
        best = continuations(context)[:num]
        return TokenLogprob(0.0, 1, tuple(token for token, _ in best), tuple(logprob for _, logprob in best))


def _host_slots(num: int, block_size: int, descriptor: int | None) -> NDArray[np.int64]:
    """int64 [num, block_size]"""
    if descriptor is None or not num:
        return np.full((num, block_size), _UNREAD, dtype=np.int64)
    return np.frombuffer(mapped(descriptor, num * block_size * 8), dtype=np.int64).reshape(num, block_size)


def _allowed(batch: ScheduledBatch) -> dict[int, NDArray[np.int64]]:
    """The tokens that may follow those of `batch.sampled` that have a grammar, by their place there."""
    allowed = allowed_tokens(batch, (EOS_TOKEN_ID,))
    if allowed is None:
        return {}
    return dict(zip(allowed.places.tolist(), token_lists(allowed.bits), strict=True))


def entries(tokens: TokenIds, start: int) -> NDArray[np.int64]:
    """What stands for the keys and values of tokens from position `start` on; int64 [num_tokens]."""
    positions = np.arange(start, start + len(tokens), dtype=np.int64)
    return (positions << 32) | tokens.astype(np.int64)


def choose(context: NDArray[np.int64], mean_output_len: int, allowed: NDArray[np.int64] | None = None) -> int:
    """The token that follows this context; another one when it is not among those `allowed`."""
    return _chosen(zlib.crc32(context.tobytes()), mean_output_len, allowed)


def _chosen(digest: int, mean_output_len: int, allowed: NDArray[np.int64] | None) -> int:
    letter = FIRST_BYTE + int(_LETTERS[(digest >> 8) % len(_LETTERS)])
    token = EOS_TOKEN_ID if digest % mean_output_len == 0 else letter
    if allowed is None or token in allowed:
        return token
    return int(allowed[(digest >> 8) % len(allowed)]) if len(allowed) else NO_TOKEN


def read(context: NDArray[np.int64], item: Item) -> NDArray[np.float64]:
    """What is read in an item whose context is this; as a runner has it."""
    reads = item.sequence.request.reads
    if isinstance(reads, TokenLogprobs):
        own = item.reading_span
        pairs = zip(reads.positions[own].tolist(), reads.token_ids[own].tolist(), strict=True)
        return np.array([logprob(context[: position + 1], token) for position, token in pairs]).reshape(-1, 2)
    assert isinstance(reads, PooledHidden), "nothing is to be read"
    states = [hidden(context[: position + 1]) for position in item.read_positions.tolist()]
    return np.sum(states, axis=0) if states else np.empty(0)


def logprob(context: NDArray[np.int64], token: int) -> tuple[float, float]:
    """Of a token behind this context, and whether it counts as the likeliest; no sum of them is rounded."""
    digest = zlib.crc32(token.to_bytes(4, "little"), zlib.crc32(context.tobytes()))
    return -(digest % 4096) / 256, float(digest >> 12 & 1)


def continuations(context: NDArray[np.int64]) -> list[tuple[int, float]]:
    """What may follow this context, as beams see it, with log-probabilities; the likeliest first."""
    tokens = [EOS_TOKEN_ID, *sorted({FIRST_BYTE + int(letter) for letter in _LETTERS})]
    return sorted(((token, logprob(context, token)[0]) for token in tokens), key=lambda pair: -pair[1])


def hidden(context: NDArray[np.int64]) -> NDArray[np.float64]:
    """[HIDDEN_SIZE], what stands for the state behind this context; no sum of them is rounded."""
    digest = zlib.crc32(context.tobytes())
    return np.array([1 + (digest >> 8 * part & 0xFF) for part in range(HIDDEN_SIZE)], np.float64)


def answer(prompt: TokenIds, max_tokens: int, mean_output_len: int, ends_at: Iterable[int]) -> list[int]:
    """The oracle: what the model answers a prompt, with no engine at all."""
    tokens, endings = list(prompt), set(ends_at)
    for _ in range(max_tokens):
        tokens.append(choose(entries(np.array(tokens, dtype=np.int32), 0), mean_output_len))
        if tokens[-1] in endings:
            break
    return tokens[len(prompt) :]
