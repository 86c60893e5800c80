"""What a child process is given and what it gives back, as JSON.

Scripts of `children/` may run under a Python that has no batchrun: they import this for their annotations only.
"""

from typing import Any, TypedDict


class GivenChoices(TypedDict):
    """Choices to score behind their prompts, as text and as tokens.

    `model` is a folder with config, safetensors and tokenizer; None: the model `echo`. `rows_file` is a Parquet file
    with the same rows (`prompt`, `choices`). `options` are the way's own; `scratch` is an empty folder.
    """

    model: str | None
    rows_file: str
    prompts: list[str]
    choices: list[list[str]]
    prompt_ids: list[list[int]]
    choice_ids: list[list[list[int]]]
    threads: int
    is_pinned: bool
    options: dict[str, Any]
    scratch: str


class Scored(TypedDict):
    """Log-likelihoods of the choices of each row, and when the first row was handed over and the last one was back, by
    `time.monotonic()`. `computed_tokens` were computed, the rest was found in a cache; None: the way does not tell.
    """

    began: float
    ended: float
    logprobs: list[list[float]]
    computed_tokens: int | None
