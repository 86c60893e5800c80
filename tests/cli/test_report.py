"""The printed plan: every figure, and nothing in the sample that a terminal would obey."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from batchrun.cli_report import plan_text, summary_text
from batchrun.cli_text import aligned, size
from batchrun.outcome import Outcome
from batchrun.plan.plan import Plan, PlanSummary, Unit
from batchrun.plan.sharing import Sharing
from batchrun.tune.simulation import Estimate
from tests.cli.fake_library import Library, Run

SUMMARY = PlanSummary(
    num_rows=111,
    num_unique=100,
    num_duplicates=7,
    errors={"empty_prompt": 1, "template_error": 3},
    error_examples={"template_error": "row 3: 'body'\x1b[31m is undefined", "empty_prompt": "row 9 is null"},
    prompt_tokens=4000,
    unique_prompt_tokens=1000,
    duplicate_tokens=280,
    max_tokens_total=25600,
    longest_prompt=63,
    longest_prompt_row=17,
    longest_len=319,
    kv_bytes_per_token=23040,
    peak_kv_bytes=3 * 1024**3,
    prompt_source="column 'prompt'",
    sample="You are\x1b]0;x\x07 terse.\n\tAnswer: " + "z" * 100,
    sample_row=5,
)

ESTIMATE = Estimate(
    run_s=725.4,
    at_most_s=1210.0,
    start_s=4.4,
    are_lengths_known=False,
    steps=1240,
    computed_tokens=13700,
    output_tokens=12800,
    peak_kv_bytes=2 * 1024**3,
    num_simulated=100,
    label="2026-11-30 on cpu, float32",
)

SHARED = Sharing(True)


@pytest.fixture
def plan() -> Plan:
    units = (
        Unit(0, Path("/data/out.batchrun/plan/unit-00000.arrow"), num_rows=100, num_tokens=4000, num_input_rows=107),
    )
    return Plan(Path("/data/out.batchrun/plan"), SUMMARY, units)


def test_plan_is_an_aligned_block(plan: Plan) -> None:
    assert plan_text(plan, ESTIMATE, SHARED).splitlines() == [
        "rows      100 to run · 4 failed (template_error 3, empty_prompt 1) · 7 duplicates share an answer",
        "          empty_prompt: row 9 is null",
        "          template_error: row 3: 'body'\\x1b[31m is undefined",
        "prompts   4,000 tokens · column 'prompt'",
        "longest   63 tokens (row 17) · 319 with its output",
        "prefixes  save 3,000 (75.0%) · 1,000 to compute",
        "output    at most 25,600 tokens",
        "KV        22.5KiB a token · longest row 7.0MiB · peak 3.0GiB",
        "time      about 12m05s with outputs half as long as allowed, 20m10s at most · 1,240 steps · "
        "4s to start and publish · by what was measured 2026-11-30 on cpu, float32",
        "units     1 in /data/out.batchrun/plan",
        "sample    row 5",
        "          │ You are\\x1b]0;x\\x07 terse.",
        "          │     Answer: " + "z" * 87 + "…",
    ]


def test_long_sample_shows_its_two_ends(plan: Plan) -> None:
    sample = "\n".join(f"line {number}" for number in range(63))
    shown = plan_text(replace(plan, summary=replace(SUMMARY, sample=sample)), None, SHARED).splitlines()[-13:]
    assert [line.strip(" │") for line in shown] == [
        *(f"line {number}" for number in range(6)),
        "… 51 lines …",
        *(f"line {number}" for number in range(57, 63)),
    ]


def test_plan_of_no_rows(plan: Plan) -> None:
    empty = replace(
        SUMMARY, num_rows=0, num_unique=0, num_duplicates=0, errors={}, error_examples={}, prompt_tokens=0,
        unique_prompt_tokens=0, longest_prompt=0, longest_prompt_row=None, longest_len=0, sample="", sample_row=None,
    )  # fmt: skip
    lines = plan_text(replace(plan, summary=empty, units=()), None, SHARED).splitlines()
    assert lines[0] == "rows      0 to run"
    assert lines[-1] == "sample    no row can run"
    assert "prefixes  save 0 (0%) · 0 to compute" in lines


def test_plan_command_prints_the_block_or_one_object(library: Library, run: Run, plan: Plan) -> None:
    library.made = plan
    shown = plan_text(plan, None, SHARED, how_to_estimate="batchrun tune echo")
    assert run("plan", "a", "-o", "out").stdout == shown + "\n"
    result = run("plan", "a", "-o", "out", "--json")
    shown = json.loads(result.stdout)
    assert (shown["num_unique"], shown["saved_tokens"], shown["units"]) == (100, 3000, 1)
    assert "\x1b" not in result.stdout
    assert shown["estimate"] is None
    assert shown["prefix_caching"] == {"is_on": True, "reason": ""}


def test_rows_that_are_done_are_not_to_run_again(library: Library, run: Run, plan: Plan) -> None:
    """The plan of a complete job said that all of it was to run."""
    library.made, library.done = plan, 63
    assert run("plan", "a", "-o", "out").stdout.startswith("rows      48 of 111 to run, the others are done · 4 f")
    assert json.loads(run("plan", "a", "-o", "out", "--json").stdout)["num_done"] == 63
    library.done = 111
    assert run("plan", "a", "-o", "out").stdout.startswith("rows      nothing to run, all 111 are done · 4 failed")


def test_plan_command_prints_the_estimate(library: Library, run: Run, plan: Plan) -> None:
    library.made, library.estimated = plan, ESTIMATE
    assert run("plan", "a", "-o", "out").stdout == plan_text(plan, ESTIMATE, SHARED) + "\n"
    assert json.loads(run("plan", "a", "-o", "out", "--json").stdout)["estimate"] == asdict(ESTIMATE)


def test_plan_says_why_prefixes_are_not_shared(library: Library, run: Run, plan: Plan) -> None:
    library.made = replace(plan, summary=replace(SUMMARY, unique_prompt_tokens=3990))
    reason = "only 10 of 4,000 prompt tokens are shared, less than 0.5%; --prefix-caching on shares them all the same"
    assert f"prefixes  not shared · {reason}" in run("plan", "a", "-o", "out").stdout.splitlines()
    shown = json.loads(run("plan", "a", "-o", "out", "--json").stdout)
    assert shown["prefix_caching"] == {"is_on": False, "reason": reason}
    off = run("plan", "a", "-o", "out", "--prefix-caching", "off").stdout.splitlines()
    assert "prefixes  not shared" in off


def test_known_lengths_leave_one_time(plan: Plan) -> None:
    known = replace(ESTIMATE, are_lengths_known=True, at_most_s=725.4)
    assert "time      about 12m05s · 1,240 steps" in plan_text(plan, known, SHARED)


def test_without_a_measurement_the_plan_says_how_to_get_one(plan: Plan) -> None:
    shown = plan_text(plan, None, SHARED, how_to_estimate="batchrun tune m --dtype float32")
    assert "time      unknown: batchrun tune m --dtype float32 measures the model on this machine" in shown
    assert "time" not in plan_text(plan, None, SHARED), "nothing measures it"


def test_summary_of_a_job_that_shared_nothing_on_purpose() -> None:
    outcome = Outcome(Path("/data/out"), rows=63, prompt_tokens=111, computed_tokens=111, shares_prefixes=False)
    assert "prompts    111 tokens · prefix caching off · 111 computed" in summary_text(outcome).splitlines()


def test_summary_shows_latencies_when_there_are_any() -> None:
    outcome = Outcome(Path("/data/out"), rows=63)
    assert "first token" not in summary_text(outcome)
    outcome.latencies.first_token.add(0.5)
    assert summary_text(outcome).splitlines()[-1].startswith("first token  p50 ")
    assert json.loads(json.dumps(outcome.as_dict()))["latencies"]["time_to_first_token_s"]["count"] == 1


def test_aligned_puts_further_lines_under_the_first() -> None:
    assert aligned([("a", "1\n2"), ("longer", "3")]) == "a       1\n        2\nlonger  3"


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0B"), (1023, "1023B"), (1536, "1.5KiB"), (4 * 1024**3, "4.0GiB"), (2**60, "1024.0PiB")]
)
def test_size(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text
