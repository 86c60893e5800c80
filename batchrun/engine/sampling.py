"""Logits to tokens, in vLLM's order: grammar, bias, penalties, bad words, min_tokens, temperature, min_p, top_k, top_p,
a draw.

Randomness is a hash of (seed, row, position): it has no state, so a draw depends on neither batch nor order nor
resume. Tokens that tie with the last one kept by top_k or top_p are kept too, so that no sort order matters.
"""

import math

import numpy as np
import torch
from torch import Tensor

from batchrun.engine.allowed import AllowedTokens
from batchrun.engine.queues import to_device
from batchrun.engine.request import TokenIds
from batchrun.engine.step import NO_TOKEN, Item

# Rows filtered at once: bounds the float64 copies of [rows, vocab]. On a CPU each by itself, which is no slower: torch
# sums a lone row in another order than several, so that a draw would depend on how many there are.
_ROWS_AT_ONCE, _ROWS_AT_ONCE_ON_CPU = 32, 1
# Tokens ordered at first; the rest only for rows that need it. 32 rows of 49,152: 24 ms against 226 for all (CPU).
_HEAD = 512
_MASK64 = (1 << 64) - 1


def sample(
    logits: Tensor,  # [num_sampled, vocab]
    items: tuple[Item, ...],
    eos_token_ids: tuple[int, ...],
    allowed: AllowedTokens | None = None,
) -> Tensor:
    """int64 [num_sampled], on the device of the logits: the token behind each item, NO_TOKEN if logits are not finite.

    On a GPU nothing is waited for, except where rows have penalties, bias, bad words or `min_tokens`.
    """
    if allowed is not None:
        logits = _masked(logits, allowed)
    if any(_is_adjusted(item) for item in items):
        logits = logits.float().clone()
        for row, item in zip(logits, items, strict=True):
            if _is_adjusted(item):
                _adjust(row, item, eos_token_ids)
    best, chosen = logits.max(dim=-1)
    random = [index for index, item in enumerate(items) if not item.sequence.request.sampling.is_greedy]
    at_once = _ROWS_AT_ONCE if logits.is_cuda else _ROWS_AT_ONCE_ON_CPU
    for first in range(0, len(random), at_once):
        some = random[first : first + at_once]
        rows = to_device(np.array(some), logits.device)
        chosen[rows] = _draw(logits[rows].double(), [items[row] for row in some])
    return if_finite(best, chosen)


def takes_likeliest(item: Item) -> bool:
    """Whether nothing but the logits decides which token is behind the item: the largest one's."""
    sequence = item.sequence
    return sequence.request.sampling.is_greedy and sequence.matcher is None and not _is_adjusted(item)


def if_finite(
    logits: Tensor,  # [num_sampled]
    tokens: Tensor,  # int64 [num_sampled], changed in place
) -> Tensor:
    """int64 [num_sampled]: the tokens of these logits, NO_TOKEN for those that are not finite."""
    return tokens.masked_fill_(~logits.isfinite(), NO_TOKEN)


def uniform(seed: int, row_idx: int, position: int) -> float:
    """In [0, 1), 53 bits: splitmix64 over the three, one after another."""
    state = 0
    for part in (seed, row_idx, position):
        state = _splitmix64(state ^ (part & _MASK64))
    return (state >> 11) * 2.0**-53


def _splitmix64(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & _MASK64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
    return state ^ (state >> 31)


def _masked(
    logits: Tensor,  # [num_sampled, vocab], changed in place
    allowed: AllowedTokens,
) -> Tensor:
    """-inf where a row's grammar has no place for the token; other rows as they are."""
    barred = ~allowed.bits.view(np.uint8)
    if logits.is_cuda:
        # An eighth of the bytes to copy.
        bits = unpacked(to_device(barred, logits.device))
    else:
        # 0.2 ms for 64 rows of 49,152, against 3.3.
        bits = torch.from_numpy(np.unpackbits(barred, axis=1, bitorder="little"))
    is_barred = bits[:, : logits.shape[-1]].view(torch.bool)
    if len(allowed.places) == len(logits):
        return logits.masked_fill_(is_barred, -math.inf)
    rows = to_device(allowed.places, logits.device)
    logits[rows] = logits[rows].masked_fill_(is_barred, -math.inf)
    return logits


def unpacked(
    packed: Tensor,  # uint8 [num_rows, num_bytes]
) -> Tensor:
    """uint8 [num_rows, 8 * num_bytes]: the bits, each byte's lowest first."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[:, :, None] >> shifts) & 1).flatten(1)


def _is_adjusted(item: Item) -> bool:
    request = item.sequence.request
    is_biased = bool(request.sampling.logit_bias or request.bad_words)
    return is_biased or request.sampling.has_penalties or _is_too_short(item)


def _is_too_short(item: Item) -> bool:
    """Whether its end must not come yet. A grammar sees to that itself: it may have no other token."""
    return item.output_len < item.sequence.request.sampling.min_tokens and item.sequence.matcher is None


def _adjust(
    row: Tensor,  # float32 [vocab], changed in place
    item: Item,
    eos_token_ids: tuple[int, ...],
) -> None:
    sampling = item.sequence.request.sampling
    if sampling.logit_bias:
        biased, bias = zip(*sampling.logit_bias, strict=True)
        row[list(biased)] += row.new_tensor(bias)
    if sampling.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(item.context).astype(np.int64)).to(row.device)
        scores = row[seen]
        row[seen] = torch.where(scores > 0, scores / sampling.repetition_penalty, scores * sampling.repetition_penalty)
    if sampling.frequency_penalty or sampling.presence_penalty:
        ids, counts = np.unique(item.context[item.sequence.prompt_len :], return_counts=True)
        lost = torch.from_numpy(counts * sampling.frequency_penalty + sampling.presence_penalty).to(row)
        row[torch.from_numpy(ids.astype(np.int64)).to(row.device)] -= lost
    if barred := _completing(item.sequence.request.bad_words, item.context[item.sequence.prompt_len :]):
        row[barred] = -math.inf
    if _is_too_short(item):
        ends = sampling.stop_token_ids if sampling.ignore_eos else (*eos_token_ids, *sampling.stop_token_ids)
        row[list(ends)] = -math.inf


def _completing(words: tuple[tuple[int, ...], ...], output_ids: TokenIds) -> list[int]:
    """The tokens that would complete one of the words."""
    return [word[-1] for word in words if len(word) == 1 or tuple(output_ids[-len(word) + 1 :].tolist()) == word[:-1]]


def _draw(
    logits: Tensor,  # float64 [num_rows, vocab], after the penalties
    items: list[Item],
) -> Tensor:
    """int64 [num_rows]: inverse CDF in the order of the token ids."""
    params = [item.sequence.request.sampling for item in items]
    scaled = logits / _column([one.temperature for one in params], logits)
    best = scaled.amax(dim=-1, keepdim=True)
    min_p = [math.log(one.min_p) if one.min_p > 0 else -math.inf for one in params]
    scaled.masked_fill_(scaled < best + _column(min_p, logits), -math.inf)
    if any(one.top_k > 0 or one.top_p < 1 for one in params):
        top_k = [one.top_k if one.top_k > 0 else logits.shape[-1] for one in params]
        scaled.masked_fill_(scaled < _threshold(scaled, top_k, [one.top_p for one in params]), -math.inf)
    weights = (scaled - best).exp()
    cumulated = weights.cumsum(dim=-1)
    requests = [item.sequence.request for item in items]
    draws = [uniform(one.seed, one.input_row, item.end) for one, item in zip(requests, items, strict=True)]
    total = cumulated[:, -1:]
    # Below the total even where the product rounds up to it.
    aims = torch.minimum(_column(draws, logits) * total, torch.nextafter(total, torch.zeros_like(total)))
    # The first token whose cumulated weight exceeds the aim: never one of weight zero.
    return torch.searchsorted(cumulated, aims, right=True)[:, 0]


def _threshold(
    scaled: Tensor,  # float64 [num_rows, vocab]
    top_k: list[int],
    top_p: list[float],
) -> Tensor:
    """float64 [num_rows, 1]: the score of the last token that top_k, and then top_p, keeps."""
    vocab_size = scaled.shape[-1]
    # A GPU sorts all sooner than it tells the host whether it has to.
    head = vocab_size if scaled.is_cuda else min(vocab_size, _HEAD)
    found = _threshold_within(scaled.topk(head, dim=-1).values, top_k, top_p, scaled)
    for row in () if head == vocab_size else found.isnan().flatten().nonzero().flatten().tolist():
        every = scaled[row : row + 1].sort(dim=-1, descending=True).values
        found[row] = _threshold_within(every, top_k[row : row + 1], top_p[row : row + 1], scaled[row : row + 1])[0]
    return found


def _threshold_within(
    ordered: Tensor,  # float64 [num_rows, head], the highest scores, descending
    top_k: list[int],
    top_p: list[float],
    scaled: Tensor,  # float64 [num_rows, vocab]
) -> Tensor:
    """float64 [num_rows, 1]; NaN where the answer lies beyond the head."""
    head, vocab_size = ordered.shape[-1], scaled.shape[-1]
    k = _column([min(one, vocab_size) for one in top_k], ordered).long()
    p = _column(top_p, ordered)
    floor = ordered.gather(1, k.clamp(max=head) - 1).masked_fill(k == vocab_size, -math.inf)
    # top_p is a share of what top_k leaves, in the head or not.
    total = scaled.masked_fill(scaled < floor, -math.inf).logsumexp(dim=-1, keepdim=True)
    share = (ordered.masked_fill(ordered < floor, -math.inf) - total).exp()
    reached = share.cumsum(dim=-1)
    num_kept = (reached - share < p).sum(dim=-1, keepdim=True).clamp(min=1)
    nucleus = torch.maximum(ordered.gather(1, num_kept - 1), floor)
    is_beyond = ((k > head) & (k < vocab_size)) | ((p < 1) & (reached[:, -1:] < p) & (head < vocab_size))
    return torch.where(p < 1, nucleus, floor).masked_fill(is_beyond, math.nan)


def _column(values: list[float] | list[int], like: Tensor) -> Tensor:
    """float64 [num_rows, 1]."""
    return to_device(np.array(values, np.float64), like.device)[:, None]
