"""Log-probabilities of chosen tokens, as the model itself has them: before masks, penalties and temperature."""

from dataclasses import dataclass

import torch
from torch import Tensor

from batchrun.engine.queues import to_host
from batchrun.engine.request import TokenLogprob

# One row after the other on a CPU: what is summed for a row does not depend on the others, and memory is bounded.
_ROWS_AT_ONCE, _ROWS_AT_ONCE_ON_CPU = 64, 1


@dataclass(frozen=True, slots=True)
class Logprobs:
    """What tensors say of the tokens of a step; on the host once the step is over."""

    chosen: Tensor  # float32 [num_sampled]
    ranks: Tensor  # int64 [num_sampled], from 1
    top_ids: Tensor  # int64 [num_sampled, num_top]
    top: Tensor  # float32 [num_sampled, num_top], descending

    def on_host(self) -> "Logprobs":
        """To be read when the step is over."""
        return Logprobs(*map(to_host, (self.chosen, self.ranks, self.top_ids, self.top)))

    def listed(self) -> tuple[TokenLogprob, ...]:
        columns = (self.chosen.tolist(), self.ranks.tolist(), self.top_ids.tolist(), self.top.tolist())
        return tuple(
            TokenLogprob(one, rank, tuple(ids), tuple(top)) for one, rank, ids, top in zip(*columns, strict=True)
        )


def logprobs_of(
    logits: Tensor,  # [num_sampled, vocab]
    tokens: Tensor,  # int64 [num_sampled], or NO_TOKEN, of which nothing is said
    num_top: int,
) -> Logprobs:
    """`num_top` likeliest tokens for each chosen one. A rank counts the tokens that are at least as likely."""
    at_once = _ROWS_AT_ONCE if logits.is_cuda else _ROWS_AT_ONCE_ON_CPU
    parts = [
        _of_rows(logits[first : first + at_once].float(), tokens[first : first + at_once].clamp(min=0), num_top)
        for first in range(0, len(tokens), at_once)
    ]
    return joined(parts) if parts else _of_rows(logits.float(), tokens, num_top)


def joined(parts: list[Logprobs]) -> Logprobs:
    """Of several batches one after the other."""
    if len(parts) == 1:
        return parts[0]
    columns = zip(*((part.chosen, part.ranks, part.top_ids, part.top) for part in parts), strict=True)
    return Logprobs(*(torch.cat(column) for column in columns))


def _of_rows(logits: Tensor, tokens: Tensor, num_top: int) -> Logprobs:
    scores = logits.gather(1, tokens[:, None])
    total = logits.logsumexp(dim=-1, keepdim=True)
    top = logits.topk(min(num_top, logits.shape[-1]), dim=-1)
    return Logprobs((scores - total)[:, 0], (logits >= scores).sum(dim=-1), top.indices, top.values - total)
