"""Stop strings in the text of one sequence, found as its tokens come, whatever came before it was resumed."""

import pytest

from batchrun.engine.request import Request, SamplingParams
from batchrun.engine.sequence import Sequence
from batchrun.engine.stop import StopStrings


def decode(ids):
    return bytes(ids.tolist()).decode("utf-8", errors="replace")


def ends(text: str, num_saved: int, stop: str, reasoning_end: str | None = None) -> list[tuple[int, int | None]]:
    """Where each stop was found behind the saved tokens: tokens by then, and the text's length without it."""
    tokens, found = tuple(text.encode()), []
    sampling = SamplingParams(max_tokens=100, stop=(stop,))
    request = Request(0, (1,), sampling, 0, tokens[:num_saved], reasoning_end=reasoning_end)
    sequence, stops = Sequence(request, 0), StopStrings(decode)
    for token in tokens[num_saved:]:
        sequence.expect()
        sequence.resolve(token)
        if stops.find(sequence) is not None:
            found.append((len(sequence.output_ids), sequence.text_len))
    return found


@pytest.mark.parametrize("num_saved", range(14))
@pytest.mark.parametrize("text", ["aXbcXYdXYe", "é€XYaXYb", "XYXYXY"])
def test_what_is_found_behind_saved_tokens_is_what_is_found_there_from_the_beginning(text, num_saved):
    """A stop string that was complete before min_tokens ends nothing later, also of a row that was resumed."""
    whole = ends(text, 0, "XY")
    assert len(whole) == text.count("XY")
    assert ends(text, num_saved, "XY") == [(at, length) for at, length in whole if at > num_saved]


@pytest.mark.parametrize("num_saved", range(12))
def test_reasoning_that_has_ended_in_saved_tokens_has_ended(num_saved):
    whole = ends("XYa>bXYcXYd", 0, "XY", ">")
    assert whole == [(7, 5), (10, 8)]
    assert ends("XYa>bXYcXYd", num_saved, "XY", ">") == [each for each in whole if each[0] > num_saved]
