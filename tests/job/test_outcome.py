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


def test_a_notebook_shows_the_figures_that_matter_and_escapes_names() -> None:
    ran = Outcome(
        Path("<out>"), rows=1200, errors={"timeout": 2}, prompt_tokens=100, cached_tokens=25, output_tokens=30, steps=4,
        run_s=2.0, elapsed_s=5.5,
    )  # fmt: skip
    assert ran._repr_html_() == (
        "<table><tr><th>result</th><td>&lt;out&gt;</td></tr><tr><th>rows</th><td>1,200</td></tr>"
        "<tr><th>failed</th><td>2 of 1,200 rows failed (timeout 2)</td></tr>"
        "<tr><th>prompts</th><td>100 tokens, 25.0% of them shared</td></tr>"
        "<tr><th>output</th><td>30 tokens, 15.0 a second</td></tr>"
        "<tr><th>time</th><td>5.5 s, 2.0 s of them in the engine</td></tr></table>"
    )
    found = Outcome(Path("out"), rows=3, already_complete=True)._repr_html_()
    assert "<th>failed</th><td>none</td>" in found
    assert "it was complete already; nothing was run" in found
