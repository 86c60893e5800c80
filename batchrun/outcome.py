"""How a job ended, in numbers.

Knows nothing of how they came about; `errors` counts rows by the types of `batchrun.errors.RowErrorType`.
"""

from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from batchrun.errors import DataError
from batchrun.latency import Latencies


@dataclass(frozen=True, slots=True)
class Outcome:
    """A completed job: every one of `rows` is in `output`, a folder or its URL, those that failed with their error.

    From `prompt_tokens` on the figures are the engine's in this process, zero when the job was `already_complete`:
    of the prompt tokens that it was given, `cached_tokens` came from a shared prefix and `computed_tokens` were
    computed; `recomputed_tokens` were computed again after a preemption; of `drafted_tokens` guessed ahead
    `accepted_tokens` were right. `run_s` is the time the engine ran, without planning, loading and publishing, and
    `checkpoint_s` the part of it that went into saving, `recording_s` the part that went into progress, series and
    metrics;
    `occupancy` the share of the batch's places that held a running row, over all steps. `latencies` are those of all
    processes that worked on the job. Without `shares_prefixes` rows were not to share any. `max_error_rate` is the
    job's budget, a share of 1; None: no limit. `error_examples` has the message of one such row
    for each type that was found while planning. `reused` rows were copied from an earlier job, of which `vanished` rows
    are not in the input any more; they are counted over all processes. `retried` rows were answered once more.
    """

    output: Path | str
    rows: int
    errors: dict[str, int] = field(default_factory=dict)
    error_examples: dict[str, str] = field(default_factory=dict)
    duplicates: int = 0
    reused: int = 0
    vanished: int = 0
    retried: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    swapped_bytes: int = 0
    recomputed_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    steps: int = 0
    occupancy: float = 0.0
    run_s: float = 0.0
    checkpoint_s: float = 0.0
    recording_s: float = 0.0
    elapsed_s: float = 0.0
    latencies: Latencies = field(default_factory=Latencies)
    already_complete: bool = False
    shares_prefixes: bool = True
    max_error_rate: float | None = None

    @property
    def num_failed(self) -> int:
        return sum(self.errors.values())

    @property
    def error_rate(self) -> float:
        return self.num_failed / self.rows if self.rows else 0.0

    @property
    def failures(self) -> str:
        """How many rows failed, by type, the most frequent first."""
        worst = ", ".join(f"{name} {count}" for name, count in sorted(self.errors.items(), key=lambda item: -item[1]))
        return f"{self.num_failed:,} of {self.rows:,} rows failed ({worst})"

    @property
    def hit_rate(self) -> float:
        """The share of the prompt tokens that a shared prefix saved."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def check_budget(self, remedy: str | None = None) -> None:
        """Nothing, when few enough rows failed.

        Raises:
            DataError: more failed than the budget allows, or all of them; the message ends with `remedy`, by default
                where the errors are. The output is complete all the same.
        """
        remedy = remedy or f"see the error column of {self.output}"
        if self.rows and self.num_failed == self.rows:
            raise DataError(f"{self.failures}; {remedy}")
        if self.max_error_rate is not None and self.error_rate > self.max_error_rate:
            raise DataError(f"{self.failures}, more than --max-error-rate {self.max_error_rate:.4g} allows; {remedy}")

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values for JSON, with the derived figures."""
        values = asdict(self) | {"output": str(self.output), "latencies": self.latencies.summary()}
        return values | {"failed": self.num_failed, "error_rate": self.error_rate, "hit_rate": self.hit_rate}

    def _repr_html_(self) -> str:
        """What a notebook shows of it."""
        lines = [
            ("result", str(self.output)),
            ("rows", f"{self.rows:,}"),
            ("failed", self.failures if self.num_failed else "none"),
        ]
        if self.steps:
            shared = f"{self.prompt_tokens:,} tokens, {self.hit_rate:.1%} of them shared"
            rate = f"{self.output_tokens / self.run_s:,.1f} a second" if self.run_s else ""
            lines += [("prompts", shared), ("output", f"{self.output_tokens:,} tokens, {rate}".rstrip(", "))]
            lines += [("time", f"{self.elapsed_s:,.1f} s, {self.run_s:,.1f} s of them in the engine")]
        else:
            lines += [("time", "it was complete already; nothing was run")]
        cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in lines)
        return f"<table>{cells}</table>"
