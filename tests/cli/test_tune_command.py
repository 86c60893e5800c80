"""tune from the outside: what is asked of the library, and what a person reads."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from batchrun.cli_tune import tuned_text
from batchrun.executors.local import Limits
from batchrun.tune.choice import Choice, Prospect, TypicalRow, Weights
from batchrun.tune.tune import Tuned
from tests.cli.fake_library import Library, Run
from tests.tune.profiles import make_profile

USUAL = Prospect(Limits(128, 512), first_token_s=600.0, step_s=0.6, tokens_per_s=53.0)
BEST = Prospect(Limits(64, 1024), first_token_s=500.0, step_s=0.9, tokens_per_s=64.25)
QUICKEST = Prospect(Limits(8, 64), first_token_s=900.0, step_s=0.0321, tokens_per_s=20.0)


@pytest.fixture
def tuned() -> Tuned:
    choice = Choice(BEST, USUAL, (QUICKEST, BEST))
    return Tuned(make_profile(), Path("/cache/profiles/echo.json"), choice, TypicalRow())


def test_options_say_what_is_measured_and_what_for(library: Library, run: Run, tuned: Tuned) -> None:
    library.tuned = tuned
    result = run("tune", "echo", "--dtype", "float32", "--alpha", "1", "--beta=2.5", "--quick")
    assert result.exit_code == 0, result.stderr
    ((job, weights, is_quick),) = library.tuned_for
    assert (job.model, job.dtype, weights, is_quick) == ("echo", "float32", Weights(1.0, 2.5), True)


def test_the_default_model_for_a_job_that_waits_for_its_end(library: Library, run: Run, tuned: Tuned) -> None:
    library.tuned = tuned
    assert run("tune").exit_code == 0
    ((job, weights, is_quick),) = library.tuned_for
    assert (job.model, job.device, weights, is_quick) == (None, "auto", Weights(1.0, 0.0), False)


def test_the_file_of_a_job_says_what_to_measure_too(library: Library, run: Run, tuned: Tuned, tmp_path: Path) -> None:
    """And a job reads a file that says what to tune for."""
    library.tuned = tuned
    (tmp_path / "job.toml").write_text('inputs = "a"\noutput = "out"\nmodel = "echo"\ndtype = "float32"\nbeta = 7.0\n')
    assert run("tune", "-C", "job.toml", BATCHRUN_ALPHA="3").exit_code == 0
    ((job, weights, _),) = library.tuned_for
    assert (job.model, job.dtype, weights) == ("echo", "float32", Weights(3.0, 7.0))
    assert run("submit", "-C", "job.toml").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--alpha", "0"], "--alpha and --beta are both 0: nothing would be better than anything else"),
        (["--beta", "-1"], "--beta should be greater than or equal to 0, not '-1'"),
        (["--bata", "1"], "no such option --bata; did you mean --beta?"),
        (["--quick", "-m", "echo"], "no such option -m; MODEL is an argument here, so leave -m out"),
        (["--model=echo"], "no such option --model; MODEL is an argument here, so leave --model out"),
        (["a", "b"], "Got unexpected extra argument (b)"),
    ],
)
def test_wrong_usage_is_one_line(library: Library, run: Run, arguments: list[str], message: str) -> None:
    result = run("tune", *arguments)
    assert (result.exit_code, result.stderr, result.stdout) == (2, f"error: {message}\n", "")
    assert library.tuned_for == []


def test_what_was_measured_and_chosen_is_an_aligned_block(tuned: Tuned) -> None:
    threads = tuned.profile.machine.threads
    assert tuned_text(tuned).splitlines() == [
        f"model    echo · cpu · float32 · KV float32 · none attention · {threads} threads",
        "peak     F 183 GFLOP/s · B 21 GB/s · reading weights bounds steps below 17 tokens",
        "steps    63 sizes measured · times fit to 2.1% in the median, 11% at worst",
        "chosen   --max-num-batched-tokens 1024 --max-num-seqs 64",
        "because  alpha 1, beta 0; for rows of 256 and 64 tokens:",
        "          1,024 x 64   · 64 tok/s · a token every 0.9s · mean first token of 1,000 rows after 8m20s",
        "            512 x 128  · 53 tok/s · a token every 0.6s · mean first token of 1,000 rows after 10m00s · usual",
        "             64 x 8    · 20 tok/s · a token every 0.0321s · mean first token of 1,000 rows after 15m00s",
        "profile  /cache/profiles/echo.json",
    ]


def test_what_is_best_in_every_way_stands_alone(tuned: Tuned) -> None:
    lines = tuned_text(replace(tuned, choice=Choice(USUAL, USUAL, ()))).splitlines()
    assert [line for line in lines if " tok/s" in line] == [
        "            512 x 128  · 53 tok/s · a token every 0.6s · mean first token of 1,000 rows after 10m00s · usual"
    ]


def test_json_is_the_profile_with_its_file(library: Library, run: Run, tuned: Tuned) -> None:
    library.tuned = tuned
    shown = json.loads(run("tune", "--json").stdout)
    assert shown == tuned.profile.model_dump(mode="json") | {"file": "/cache/profiles/echo.json"}
