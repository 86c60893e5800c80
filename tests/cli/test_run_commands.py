"""plan, submit and resume from the outside: what reaches the library, what comes out where, and the exit code."""

import inspect
import json
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ByteSize

from batchrun.errors import (
    BatchrunError,
    DataError,
    InputMissing,
    JobMismatch,
    ModelUnavailable,
    OutputRefused,
    StoppedByUser,
    StoppedEarly,
    StorageFailed,
)
from batchrun.job import Job
from batchrun.observe.events import Message, Observe, PlanProgress
from batchrun.outcome import Outcome
from batchrun.stop import StopRequest
from tests.cli.fake_library import Library, Run

OUTCOME = Outcome(
    output=Path("/data/out"),
    rows=63,
    errors={"template_error": 1, "overlong_prompt": 2},
    error_examples={"template_error": "row 3: 'body'\x1b[31m is undefined"},
    duplicates=5,
    prompt_tokens=1000,
    computed_tokens=250,
    cached_tokens=750,
    output_tokens=4096,
    preemptions=3,
    swapped_bytes=12 * 1024**2,
    recomputed_tokens=111,
    steps=77,
    run_s=4.0,
    elapsed_s=8.0,
)


def test_the_real_library_takes_what_the_commands_give() -> None:
    from batchrun import lifecycle, planning

    for home, name in [
        (planning, "plan"),
        (planning, "num_done"),
        (planning, "estimate"),
        (planning, "find_device"),
        (planning, "simulate"),
        (planning, "tune"),
        (lifecycle, "submit"),
        (lifecycle, "resume"),
    ]:
        assert (
            list(inspect.signature(getattr(home, name)).parameters)
            == list(inspect.signature(getattr(Library, name)).parameters)[1:]
        )


def test_options_reach_the_job_typed(library: Library, run: Run, tmp_path: Path) -> None:
    result = run(
        "submit", "a.parquet", "b.parquet", "-o", "out", "-m", "echo", "-t", "{{ x }}", "-s", "Be brief.", "-L", "7",
        "--max-tokens", "16", "--stop", "a,b", "--stop", "c", "--stop-token-ids", "1,2", "--keep-cols", "x,y",
        "--ignore-eos", "--kv-cache-memory", "64MiB", "--checkpoint-every", "5s", "--max-error-rate", "1%",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert library.jobs == [
        Job(
            inputs=(f"{tmp_path}/a.parquet", f"{tmp_path}/b.parquet"), output=f"{tmp_path}/out", model="echo",
            template="{{ x }}", system="Be brief.", limit=7, max_tokens=16, stop=("a,b", "c"), stop_token_ids=(1, 2),
            keep_cols=("x", "y"), ignore_eos=True, kv_cache_memory=ByteSize(64 * 1024**2), checkpoint_every=5.0,
            max_error_rate=0.01,
        )
    ]  # fmt: skip


def test_underscores_are_accepted(library: Library, run: Run) -> None:
    result = run("submit", "a", "-o", "out", "--max_tokens", "3", "--prompt_col=the_text", "--log_format", "json")
    assert result.exit_code == 0, result.stderr
    assert (library.jobs[0].max_tokens, library.jobs[0].prompt_col) == (3, "the_text")


def test_flag_variable_and_file_meet(library: Library, run: Run, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(
        'inputs = "a"\noutput = "out"\nseed = 1\ntop_k = 1\nmin_tokens = 1\nquiet = true\n'
    )
    result = run("submit", "-C", "job.toml", "--seed", "3", BATCHRUN_SEED="2", BATCHRUN_TOP_K="2", BATCHRUN_JSON="1")
    assert result.exit_code == 0, result.stderr
    assert (library.jobs[0].seed, library.jobs[0].top_k, library.jobs[0].min_tokens) == (3, 2, 1)
    assert result.stderr == ""
    assert json.loads(result.stdout)["output"] == "/data/out"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["submit", "a"], "no output: give -o OUT"),
        (["submit", "-o", "out"], "no inputs: give INPUT…"),
        (
            ["submit", "a", "-o", "out", "--max-token", "3"],
            "no such option --max-token; did you mean --max-tokens?",
        ),
        (
            ["submit", "a", "-o", "out", "--simulate", "2"],
            "no such option --simulate; it is an option of batchrun plan",
        ),
        (
            ["retry", "out", "--workers=2"],
            "no such option --workers; it is an option of batchrun plan, batchrun submit",
        ),
        (["submit", "a", "-o", "out", "--max-tokens"], "Option '--max-tokens' requires an argument."),
        (["submit", "a", "-o", "out", "--top-p", "2"], "--top-p should be less than or equal to 1, not '2'"),
        (
            ["submit", "a", "-o", "out", "--progress", "bars"],
            "--progress should be 'auto', 'bar', 'log' or 'none', not 'bars'",
        ),
        (
            ["submit", "a", "-o", "out", "-C", "x.toml"],
            "cannot read x.toml: No such file or directory; check the path given to -C",
        ),
        (["resume"], "Missing argument 'OUT'."),
        (["plann", "a"], "no such command 'plann'; did you mean 'plan'?"),
        (
            ["zzzz"],
            "no such command 'zzzz'; there are plan, submit, resume, cancel, retry, presets, tune, status, list, "
            "report, verify, export, lm-eval, doctor",
        ),
    ],
)
def test_wrong_usage_is_one_line_and_nothing_runs(
    library: Library, run: Run, arguments: list[str], message: str
) -> None:
    result = run(*arguments)
    assert (result.stderr, result.stdout) == (f"error: {message}\n", "")
    assert result.exit_code == (66 if "x.toml" in message else 2)
    assert library.jobs == []


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (DataError("no column x"), 65),
        (InputMissing("no file"), 66),
        (ModelUnavailable("no model"), 69),
        (OutputRefused("no room"), 73),
        (StorageFailed("disk full"), 74),
        (StoppedEarly("drained"), 75),
        (JobMismatch("out.batchrun", ("template", "seed")), 78),
        (StoppedByUser("saved"), 130),
    ],
)
def test_every_error_is_one_line_with_its_exit_code(
    library: Library, run: Run, error: BatchrunError, exit_code: int
) -> None:
    library.outcome = error
    for arguments in (("submit", "a", "-o", "out"), ("resume", "out")):
        result = run(*arguments)
        assert (result.exit_code, result.stderr, result.stdout) == (exit_code, f"error: {error}\n", "")


def test_error_text_from_data_cannot_steer_the_terminal(library: Library, run: Run) -> None:
    library.outcome = DataError("column \x1b[2Jx\r\nis missing")
    assert run("submit", "a", "-o", "out").stderr == "error: column \\x1b[2Jx is missing\n"


def test_a_bug_is_a_traceback(library: Library, run: Run) -> None:
    library.outcome = ZeroDivisionError("ours")
    result = run("submit", "a", "-o", "out")
    assert (result.exit_code, result.exception) == (1, library.outcome)


def test_interrupt_outside_the_job_is_130(library: Library, run: Run) -> None:
    library.outcome = KeyboardInterrupt()
    result = run("submit", "a", "-o", "out")
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1] == "error: stopped by SIGINT; the same command goes on from here"


def test_submit_prints_the_folder_on_stdout_and_the_summary_on_stderr(library: Library, run: Run) -> None:
    library.outcome = OUTCOME
    result = run("submit", "a", "-o", "out")
    assert (result.exit_code, result.stdout) == (0, "/data/out\n")
    assert result.stderr.splitlines() == [
        "rows       63 · 3 failed (overlong_prompt 2, template_error 1) · 5 duplicates share an answer",
        "           template_error: row 3: 'body'\\x1b[31m is undefined",
        "prompts    1,000 tokens · prefix hit 75.0% · 250 computed",
        "output     4,096 tokens · 1,024.0 tok/s in the engine",
        "preempted  3 · 12.0MiB swapped · 111 tokens recomputed",
        "time       8s · 4s in the engine · 77 steps",
    ]


def test_json_result_is_one_object_and_the_last_write(library: Library, run: Run) -> None:
    library.outcome = OUTCOME
    result = run("submit", "a", "-o", "out", "--json")
    assert json.loads(result.stdout) == OUTCOME.as_dict()
    assert result.output.splitlines()[-1] == result.stdout.rstrip("\n")


def test_json_logs_are_json_on_every_line(library: Library, run: Run) -> None:
    library.during = lambda observe, stop: observe(PlanProgress(7))
    result = run("submit", "a", "-o", "out", "--log-format", "json")
    assert [json.loads(line)["message"] for line in result.stderr.splitlines()] == ["progress", "summary"]


def test_quiet_says_nothing_but_the_result_and_warnings(library: Library, run: Run) -> None:
    def talk(observe: Observe, stop: StopRequest) -> None:
        observe(PlanProgress(7))
        observe(Message("info", "loading"))
        observe(Message("warning", "the pool is small"))

    library.during = talk
    result = run("submit", "a", "-o", "out", "-q")
    assert [line.split(" ", 1)[1] for line in result.stderr.splitlines()] == ["WARNING the pool is small"]
    assert result.stdout == "/data/out\n"


def test_quiet_warns_of_failed_rows(library: Library, run: Run) -> None:
    library.outcome = OUTCOME
    result = run("submit", "a", "-o", "out", "-q")
    assert [line.split(" ", 1)[1] for line in result.stderr.splitlines()] == [
        "WARNING 3 of 63 rows failed (overlong_prompt 2, template_error 1); see the error column of /data/out"
    ]
    assert (result.exit_code, result.stdout) == (0, "/data/out\n")


def test_complete_job_says_so(library: Library, run: Run) -> None:
    library.outcome = replace(OUTCOME, errors={}, error_examples={}, already_complete=True)
    result = run("submit", "a", "-o", "out")
    assert result.exit_code == 0
    assert result.stderr == "rows      63 · 5 duplicates share an answer\ncomplete  already, nothing was run\n"


@pytest.mark.parametrize(
    ("rows", "failed", "budget", "exit_code"),
    [
        (63, 0, 0.0, 0),
        (63, 1, 0.0, 65),
        (63, 3, None, 0),
        (63, 3, 0.05, 0),
        (63, 4, 0.05, 65),
        (3, 3, None, 65),
        (0, 0, 0.0, 0),
    ],
)
def test_too_many_failed_rows_are_65_after_the_result_is_there(
    library: Library, run: Run, rows: int, failed: int, budget: float | None, exit_code: int
) -> None:
    errors = {"empty_prompt": failed} if failed else {}
    library.outcome = Outcome(Path("/data/out"), rows, errors, max_error_rate=budget)
    result = run("submit", "a", "-o", "out")
    assert (result.exit_code, result.stdout) == (exit_code, "/data/out\n")
    assert ("error: " in result.stderr) == (exit_code == 65)


def test_budget_message_names_the_types_and_where_to_look(library: Library, run: Run) -> None:
    library.outcome = replace(OUTCOME, max_error_rate=0.01)
    assert run("submit", "a", "-o", "out", "-q").stderr == (
        "error: 3 of 63 rows failed (overlong_prompt 2, template_error 1), more than --max-error-rate 0.01 allows; "
        "see the error column of /data/out\n"
    )


def test_resume_goes_to_the_stored_job_of_an_absolute_folder(library: Library, run: Run, tmp_path: Path) -> None:
    for name in ("out/", "out.batchrun", "out.batchrun/"):
        assert run("resume", name).exit_code == 0
    assert library.resumed == [tmp_path / "out"] * 3


def test_the_list_of_commands_cuts_no_description(run: Run) -> None:
    listed = run("--help").stdout.split("Commands:")[1].splitlines()
    assert len([line for line in listed if line.strip()]) == 14
    assert [line for line in listed if line.endswith("...")] == []


def test_help_of_submit_explains_inputs_default_columns_and_variables(run: Run) -> None:
    shown = " ".join(run("submit", "--help").stdout.split())
    for said in (
        "INPUT is a Parquet, JSON Lines or CSV file",
        "column called prompt, messages or text",
        "BATCHRUN_MAX_TOKENS=64",
    ):
        assert said in shown


@pytest.mark.parametrize(
    "name", ["plan", "submit", "resume", "retry", "status", "verify", "export", "presets", "doctor"]
)
def test_every_help_ends_with_an_example(run: Run, name: str) -> None:
    result = run(name, "--help")
    assert result.exit_code == 0
    assert f"  Example:\n    batchrun {name} " in result.stdout or f"  Example:\n    batchrun {name}\n" in result.stdout
