"""What passes between an engine that decodes and one that computes prompts for it, in another process.

A row is handed over before its last known token is computed: the decoding engine computes that one and chooses all
tokens. So nothing but keys and values comes from elsewhere, in host slots that both can read and write.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from batchrun.engine.request import Request, SamplingParams
from batchrun.engine.statistics import Counters

Key = tuple[int, int]  # a request's


@dataclass(frozen=True, slots=True)
class Prefill:
    """Compute the request's tokens, and copy the blocks of all but the last one that it samples into these slots."""

    request: Request
    host_slots: tuple[int, ...]

    @classmethod
    def of(cls, request: Request, host_slots: tuple[int, ...]) -> "Prefill":
        """For a row: its known tokens but the last. What is sampled behind them is dropped, and never ends it."""
        token_ids, output_ids = request.token_ids, request.output_ids[:-1]
        if not request.output_ids:
            token_ids = token_ids[:-1]
        sampling = SamplingParams(max_tokens=len(output_ids) + 2, ignore_eos=True)
        keep_len = min(request.keep_len, len(token_ids))
        return cls(
            Request(request.row_idx, token_ids, sampling, keep_len, output_ids, branch=request.branch), host_slots
        )


@dataclass(frozen=True, slots=True)
class Prefilled:
    """After a step of the prefilling engine: whose slots are filled, whose never will be, all that it has counted, and
    the processor time that it has taken; seconds."""

    filled: tuple[Key, ...]
    failed: tuple[Key, ...]
    counters: Counters
    busy_s: float


class PrefillerLost(Exception):
    """There is no prefilling engine any more. The message says how it ended, to be read after "the process"."""


class Prefiller(Protocol):
    """An engine elsewhere that computes prompts; it holds rows of up to `capacity` tokens, outputs of one included."""

    capacity: int

    def order(self, prefills: Sequence[Prefill]) -> None:
        """Has rows computed behind those ordered before. That it is lost is not told here."""
        ...

    def hear(self, *, waits: bool) -> list[Prefilled]:
        """What has been done since the last call; with `waits`, of one step at least. Raises PrefillerLost."""
        ...

    def close(self) -> None:
        """Ends it, also one that is lost, and gives back what it took of the machine."""
        ...


def num_handed_over(request: Request) -> int:
    """How many of a row's tokens another engine may compute."""
    return len(request.token_ids) + len(request.output_ids) - 1


def uncounted(counters: Counters) -> Counters:
    """What the prefilling engine counted, but for what is nobody's answer, and for prompts and places in the batch: the
    decoding engine counts all rows and its own batch."""
    return replace(counters, prompt_tokens=0, output_tokens=0, rows_finished=0, slot_steps=0, busy_slot_steps=0)
