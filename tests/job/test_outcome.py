"""The figures that are derived from a job's end."""

import json
from pathlib import Path

from batchrun.outcome import Outcome


def test_rates_and_json() -> None:
    outcome = Outcome(
        Path("/data/out"), rows=8, errors={"timeout": 2}, prompt_tokens=111, cached_tokens=37, max_error_rate=0.5
    )
    assert (outcome.num_failed, outcome.error_rate, outcome.hit_rate) == (2, 0.25, 37 / 111)
    shown = json.loads(json.dumps(outcome.as_dict()))
    assert (shown["output"], shown["failed"], shown["error_rate"]) == ("/data/out", 2, 0.25)
    assert shown["errors"] == {"timeout": 2}


def test_no_rows_have_no_rates() -> None:
    outcome = Outcome(Path("/data/out"), rows=0, max_error_rate=0.0)
    assert (outcome.error_rate, outcome.hit_rate) == (0.0, 0.0)
    outcome.check_budget()
