"""batchrun from Python: the same kind of table back, and the same errors as the command's."""

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


def test_a_wrong_option_names_the_nearest_one(tmp_path):
    with pytest.raises(UsageError, match="max_tokens"):
        br.submit(tmp_path / "in.parquet", output=tmp_path / "out", max_token=3)


def test_a_wrong_column_names_the_nearest_one():
    with pytest.raises(DataError, match="did you mean 'prompt'"):
        br.generate(pa.table({"prompt": PROMPTS}), model="echo", prompt_col="promt")
