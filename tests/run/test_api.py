"""batchrun from Python: the same kind of table back, and the same errors as the command's."""

import re

import datasets
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchrun as br
from batchrun.errors import DataError, UsageError
from tests.run.conftest import echo_text

PROMPTS = ["one", "two", "three", "one"]
OPTIONS = {"model": "echo", "prompt_col": "prompt", "max_tokens": 9}


def answers() -> list[str]:
    return [echo_text(prompt, 9) for prompt in PROMPTS]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Temporary jobs lie in the user's cache; here in a cache of the test's own, empty again afterwards."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    "table",
    [
        pytest.param(pd.DataFrame({"prompt": PROMPTS, "n": range(4)}, index=[7, 5, 3, 1]), id="pandas"),
        pytest.param(datasets.Dataset.from_dict({"prompt": PROMPTS, "n": list(range(4))}), id="datasets"),
        pytest.param(pa.table({"prompt": PROMPTS, "n": list(range(4))}), id="arrow"),
    ],
)
def test_generate_gives_back_the_kind_it_was_given(table):
    answered = br.generate(table, **OPTIONS)
    assert type(answered) is type(table)
    if isinstance(answered, pd.DataFrame):
        assert answered.index.tolist() == [7, 5, 3, 1]
    as_arrow = answered if isinstance(answered, pa.Table) else pa.table({n: list(answered[n]) for n in ("n", "text")})
    assert as_arrow.column("n").to_pylist() == [0, 1, 2, 3]
    assert as_arrow.column("text").to_pylist() == answers()


TASKS = {
    "generate": ({"max_tokens": 9}, "text"),
    "score": ({"target_col": "n"}, "target_logprob"),
    "choose": ({"choice": ["1", "2"]}, "label"),
    "embed": ({}, "embedding"),
}
KINDS = {
    "pandas": lambda table, folder: table.to_pandas(),
    "datasets": lambda table, folder: datasets.Dataset(table),
    "arrow": lambda table, folder: table,
    "str": lambda table, folder: str(folder / "in.parquet"),
    "Path": lambda table, folder: folder / "in.parquet",
}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_kind_comes_back_from_every_function(tmp_path, task, kind):
    """Tables as tables, a path as the path of the result; the same values in all of them."""
    table = pa.table({"prompt": PROMPTS, "n": ["1", "2", "3", "4"]})
    pq.write_table(table, tmp_path / "in.parquet")
    given = KINDS[kind](table, tmp_path)
    options, column = TASKS[task]
    place = {"output": tmp_path / "out"} if kind in ("str", "Path") else {}
    answered = getattr(br, task)(given, model="echo", prompt_col="prompt", **options, **place)
    assert type(answered) is type(given)
    read = (
        pq.read_table(answered)
        if place
        else answered
        if kind == "arrow"
        else pa.table({column: list(answered[column])})
    )
    expected = getattr(br, task)(table, model="echo", prompt_col="prompt", **options)
    assert [_plain(value) for value in read.column(column).to_pylist()] == expected.column(column).to_pylist()
    if place:
        assert answered == type(given)(tmp_path / "out")


def _plain(value):
    return [float(each) for each in value] if isinstance(value, list) else value


def test_a_path_needs_an_output_and_a_table_has_none(tmp_path):
    pq.write_table(pa.table({"prompt": PROMPTS}), tmp_path / "in.parquet")
    with pytest.raises(UsageError, match="generate\\(\\) of a path needs an output"):
        br.generate(tmp_path / "in.parquet", **OPTIONS)
    with pytest.raises(UsageError, match="gives a table back; output is for paths"):
        br.generate(pa.table({"prompt": PROMPTS}), output=tmp_path / "out", **OPTIONS)


def test_generate_refuses_what_is_no_table():
    with pytest.raises(UsageError, match="not list; for files use submit"):
        br.generate(PROMPTS, **OPTIONS)


def test_plan_and_submit_take_a_path(tmp_path):
    table = pa.table({"prompt": PROMPTS})
    pq.write_table(table, tmp_path / "in.parquet")
    plan = br.plan(tmp_path / "in.parquet", **OPTIONS)
    assert (plan.summary.num_rows, plan.summary.num_duplicates) == (4, 1)
    outcome = br.submit(tmp_path / "in.parquet", output=tmp_path / "out", **OPTIONS)
    assert pq.read_table(outcome.output).column("text").to_pylist() == answers()


@pytest.mark.parametrize(
    "table",
    [
        pytest.param(pd.DataFrame({"prompt": PROMPTS}), id="pandas"),
        pytest.param(datasets.Dataset.from_dict({"prompt": PROMPTS}), id="datasets"),
        pytest.param(pa.table({"prompt": PROMPTS}), id="arrow"),
        pytest.param({"prompt": PROMPTS}, id="dict"),
        pytest.param([{"prompt": "one"}], id="dicts"),
    ],
)
def test_plan_and_submit_refuse_a_table_by_its_kind(table, tmp_path):
    """A frame's column names were looked for as files."""
    kind = type(table[0] if isinstance(table, list) else table).__name__
    with pytest.raises(UsageError, match=f"take paths of files, not {kind}; for tables use generate"):
        br.plan(table, **OPTIONS)
    with pytest.raises(UsageError, match=f"take paths of files, not {kind}; for tables use generate"):
        br.submit(table, output=tmp_path / "out", **OPTIONS)


def test_paths_may_come_from_a_glob(tmp_path):
    pq.write_table(pa.table({"prompt": PROMPTS}), tmp_path / "in.parquet")
    assert br.plan(tmp_path.glob("*.parquet"), **OPTIONS).summary.num_rows == 4


@pytest.mark.parametrize(
    ("prompts", "budget", "said"),
    [
        (["one", "two", None], {"max_error_rate": 0.01}, "1 of 3 rows failed (empty_prompt 1), more than"),
        ([None, ""], {}, "2 of 2 rows failed (empty_prompt 2)"),
    ],
)
def test_too_many_failed_rows_are_an_error_and_the_result_is_there(tmp_path, prompts, budget, said):
    """The command said so, with 65, and Python nothing."""
    table = pa.table({"prompt": pa.array(prompts, pa.string())})
    pq.write_table(table, tmp_path / "in.parquet")
    for _ in range(2):
        with pytest.raises(DataError, match=re.escape(said)) as raised:
            br.submit(tmp_path / "in.parquet", output=tmp_path / "out", **OPTIONS, **budget)
        assert str(raised.value).endswith(f"see the error column of {tmp_path / 'out'}")
        assert pq.read_table(tmp_path / "out").num_rows == len(prompts)
    with pytest.raises(DataError, match=re.escape(said)) as raised:
        br.generate(table, **OPTIONS, **budget, output_prefix="x_")
    assert "the first: row" in str(raised.value)


def test_failed_rows_within_the_budget_are_rows_with_an_error(tmp_path):
    answered = br.generate(pa.table({"prompt": ["one", None]}), **OPTIONS, max_error_rate=0.5)
    assert [error and error["type"] for error in answered.column("error").to_pylist()] == [None, "empty_prompt"]


def test_a_wrong_option_names_the_nearest_one(tmp_path):
    with pytest.raises(UsageError, match="max_tokens"):
        br.submit(tmp_path / "in.parquet", output=tmp_path / "out", max_token=3)


def test_a_wrong_column_names_the_nearest_one():
    with pytest.raises(DataError, match="did you mean 'prompt'"):
        br.generate(pa.table({"prompt": PROMPTS}), model="echo", prompt_col="promt")


def test_samples_of_a_frame_that_is_cut_have_its_index():
    frame = pd.DataFrame({"prompt": PROMPTS}, index=[7, 5, 3, 1])
    answered = br.generate(frame, model="echo", n=2, temperature=1, limit=2)
    assert answered.index.tolist() == [7, 7, 5, 5]
