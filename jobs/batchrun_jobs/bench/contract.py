"""What a child process is given and what it gives back, as JSON.

Scripts of `children/` may run under a Python that has no batchrun: they import this for their annotations only.
"""

from typing import Any, NotRequired, TypedDict


class Given(TypedDict):
    """Rows to answer greedily, each with exactly `lengths[row]` tokens, whatever the model says of their end.

    `model` is a folder with config, safetensors and tokenizer; None: the model `echo`. `rows_file` is a Parquet file
    with the same rows as text (`prompt`) and JSON (`params`). `options` are the way's own; `scratch` is an empty
    folder.
    """

    model: str | None
    rows_file: str
    prompt_ids: list[list[int]]
    lengths: list[int]
    threads: int
    is_pinned: bool
    options: dict[str, Any]
    scratch: str


class Answered(TypedDict):
    """The answers, and when the first row was handed over and the last one was back, by `time.monotonic()`.

    `computed_tokens` of the prompts were computed, the rest was found in a cache; `useful` is the share of the batch's
    places that held a row that was still to be answered, 0 to 1. None: the way does not tell.
    """

    began: float
    ended: float
    token_ids: list[list[int]]
    computed_tokens: int | None
    useful: float | None
    # What rows waited for, where the way tells: by kind, percentiles in seconds.
    latencies: NotRequired[dict[str, dict[str, float]]]
    # In bytes; put there by children/start.py.
    peak_rss: NotRequired[int | None]
