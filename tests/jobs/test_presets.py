"""Presets as options: what wins over them, what they refuse, and that they ship."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from setuptools import Distribution

import batchrun as br
from batchrun.cli import batchrun as command
from batchrun.errors import DataError, UsageError
from batchrun.job import Job
from batchrun.presets import preset_names, preset_text

NEEDED = {"inputs": "rows.parquet", "output": "out"}
NAMES = ("classify", "extract", "judge", "score", "summarise", "translate")


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    table = pa.table({"review": ["Good.", "Bad.", None], "language": ["German", "French", "Dutch"]})
    pq.write_table(table, tmp_path / "reviews.parquet")
    return tmp_path / "reviews.parquet"


def test_what_there_is() -> None:
    assert preset_names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_is_a_file_that_may_be_kept_and_given_with_c(name: str, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(preset_text(name))
    assert Job.load(NEEDED, file=tmp_path / "mine.toml") == Job.load(NEEDED | {"preset": name})


def test_flag_variable_and_file_win_over_the_preset(tmp_path: Path) -> None:
    assert Job.load(NEEDED | {"preset": "summarise"}).max_tokens == 128
    file = tmp_path / "job.toml"
    file.write_text('preset = "summarise"\nmax-tokens = 3\n')
    assert Job.load(NEEDED, file=file).max_tokens == 3
    job = Job.load(NEEDED | {"choice": ("a", "b")}, {"BATCHRUN_PRESET": "classify", "BATCHRUN_PROMPT_COL": "x"})
    assert (job.task, job.choice, job.prompt_col) == ("choose", ("a", "b"), "x")


def test_of_what_a_job_has_one_the_presets_gives_way() -> None:
    job = Job.load(NEEDED | {"preset": "extract", "regex": "[a-z]+"})
    assert (job.regex, job.json_schema) == ("[a-z]+", None)
    job = Job.load(NEEDED | {"preset": "classify", "choices_col": "choice"})
    assert (job.choice, job.choices_col) == ((), "choice")
    with pytest.raises(UsageError, match="--preset judge asks about a text, and --messages-col has whole messages"):
        Job.load(NEEDED | {"preset": "judge", "messages_col": "messages"})


def test_the_job_is_that_of_the_options_written_out() -> None:
    written_out = {"task": "score", "target_col": "text"}
    assert Job.load(NEEDED | {"preset": "score"}).model_dump() == Job.load(NEEDED | written_out).model_dump()


def test_unknown_preset_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UsageError, match=r"^no preset 'sumarize'; did you mean 'summarise'\?$"):
        Job.load(NEEDED | {"preset": "sumarize"})
    with pytest.raises(UsageError, match=r"^no preset 'zzz'; there are classify, extract, judge, score"):
        Job.load(NEEDED | {"preset": "zzz"})


def test_a_file_beside_the_presets_is_none() -> None:
    with pytest.raises(UsageError, match=r"^no preset '\.\./presets/score'"):
        preset_text("../presets/score")


@pytest.mark.parametrize("name", NAMES)
def test_missing_column_is_refused_with_the_option_that_names_another(texts: Path, name: str) -> None:
    option, more = "--prompt-col", ""
    if name == "score":
        option, more = (
            "--target-col",
            "; --target-col names the text that is scored, --prompt-col what stands before it",
        )
    with pytest.raises(DataError, match=f"^{option}: the input has no column 'text'; it has: review, language{more}$"):
        br.plan(texts, preset=name, model="echo")


def test_templates_say_the_labels_and_the_language_that_were_asked_for(texts: Path) -> None:
    plan = br.plan(texts, preset="classify", prompt_col="review", choice=["praise", "blame"], model="echo")
    assert "labels fits the text: praise, blame?\n\nText: Good." in plan.summary.sample
    assert "into German. Answer" in br.plan(texts, preset="translate", prompt_col="review", model="echo").summary.sample
    english = br.plan(texts, preset="translate", prompt_col="review", keep_cols="review", model="echo").summary.sample
    assert "into German" in english, "a column is the template's whether it is kept or not"


@pytest.mark.parametrize("name", [name for name in NAMES if name != "score"])
def test_a_text_that_is_missing_is_an_empty_prompt(texts: Path, name: str) -> None:
    summary = br.plan(texts, preset=name, prompt_col="review", model="echo").summary
    assert summary.errors == {"empty_prompt": 1}


def test_judge_takes_the_result_of_another_job(texts: Path, tmp_path: Path) -> None:
    br.submit(texts, output="answers", model="echo", preset="summarise", prompt_col="review", max_tokens=8)
    br.submit("answers", output="judged", model="echo", preset="judge")
    judged = pq.read_table(tmp_path / "judged")
    assert {"text", "row_idx", "judge_label", "judge_row_idx"} <= {*judged.column_names}


def test_the_command_lists_them_and_prints_one() -> None:
    listed = CliRunner().invoke(command, ["presets"], prog_name="batchrun")
    assert [line.split()[0] for line in listed.stdout.splitlines()] == [*NAMES]
    assert "summarise  Each text in one or two sentences.\n" in listed.stdout
    shown = CliRunner().invoke(command, ["presets", "judge"], prog_name="batchrun")
    assert shown.stdout == preset_text("judge")


@pytest.mark.filterwarnings("ignore:.*experimental")
def test_a_wheel_holds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)
    distribution = Distribution({"name": "batchrun"})
    distribution.parse_config_files()
    build = distribution.get_command_obj("build_py")
    build.ensure_finalized()
    shipped = {
        Path(name).name for package, _, _, names in build.data_files if package == "batchrun_jobs" for name in names
    }
    assert shipped == {f"{name}.toml" for name in NAMES}
