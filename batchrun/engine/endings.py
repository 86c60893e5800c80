"""What ends a text that is generated token by token, and why."""

from collections.abc import Callable
from dataclasses import dataclass

from batchrun.engine.repetition import repeats_itself
from batchrun.engine.request import FinishReason
from batchrun.engine.sequence import Sequence
from batchrun.errors import RowError

FindStop = Callable[[Sequence], str | None]


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a text ends; `stop` is the stop string or stop token that ended it."""

    reason: FinishReason
    stop: str | int | None = None


def ending_of(sequence: Sequence, token: int, find_stop: FindStop, eos_token_ids: frozenset[int]) -> Ending | None:
    """Why the row ends with `token`, its last known one; None when it goes on."""
    sampling, output_len = sequence.request.sampling, len(sequence.output_ids)
    # Before min_tokens, too: a stop string that is complete by then does not end the row later.
    stop = find_stop(sequence) if sampling.stop or not sequence.is_answering else None
    if output_len >= sampling.min_tokens:
        if token in eos_token_ids and not sampling.ignore_eos:
            return Ending("stop")
        if token in sampling.stop_token_ids and sequence.is_answering:
            return Ending("stop", token)
        if stop is not None:
            return Ending("stop", stop)
    if sequence.matcher is not None and sequence.matcher.has_ended:
        return Ending("stop")
    if output_len >= sampling.min_tokens and _repeats(sequence):
        return Ending("repetition")
    return Ending("length") if output_len >= sampling.max_tokens else None


def failure_of(sequence: Sequence) -> RowError | None:
    """Why the sequence's grammar cannot say what comes next; None when it can, or there is none."""
    failure = sequence.matcher.failure if sequence.matcher is not None else None
    return None if failure is None else RowError("schema_unsupported", failure)


def _repeats(sequence: Sequence) -> bool:
    """Whether it says one thing as often in a row as its parameters do not want."""
    sampling = sequence.request.sampling
    least, longest = sampling.repetition_min_count, sampling.repetition_max_pattern_size
    return least > 0 and repeats_itself(sequence.output_ids, least, longest)
