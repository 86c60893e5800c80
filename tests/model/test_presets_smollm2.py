"""Every preset, on the real model, over texts in a column of the reader's own."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchrun as br
from batchrun.job import Job

TEXTS = ["The kettle boils in two minutes. Ann would buy it again.", "Paul waited in Rome on Monday. Never again."]
ADDED = {"cached_tokens", "error", "prompt_tokens", "row_idx"}


def answered(folder: Path, preset: str, **options: Any) -> list[dict[str, Any]]:
    """The rows that the preset adds, checked to have no error."""
    pq.write_table(pa.table({"review": TEXTS}), folder / "in.parquet")
    outcome = br.submit(folder / "in.parquet", output=folder / "out", preset=preset, keep_cols=(), **options)
    assert outcome.errors == {}
    return pq.read_table(folder / "out").to_pylist()


@pytest.mark.parametrize(("preset", "most"), [("summarise", 128), ("translate", 512)])
def test_texts_are_answered_with_text(tmp_path: Path, preset: str, most: int) -> None:
    rows = answered(tmp_path, preset, prompt_col="review")
    assert all(row["text"] and 0 < row["completion_tokens"] <= most for row in rows)


def test_extract_gives_every_field_as_a_list(tmp_path: Path) -> None:
    for row in answered(tmp_path, "extract", prompt_col="review", max_num_seqs=2):
        assert [*row["parsed"]] == ["people", "organisations", "places", "dates"]
        assert all(len(found) <= 5 for found in row["parsed"].values())


@pytest.mark.parametrize(("preset", "prefix"), [("classify", ""), ("judge", "judge_")])
def test_labels_are_among_the_choices_and_probabilities_add_up(tmp_path: Path, preset: str, prefix: str) -> None:
    choices = Job.load({"inputs": "-", "output": "-", "preset": preset}).choice
    for row in answered(tmp_path, preset, prompt_col="review"):
        assert {*row} == {prefix + name for name in ADDED | {"label", "label_prob", "choice_logprobs", "choice_probs"}}
        assert row[f"{prefix}label"] in choices
        assert sum(row[f"{prefix}choice_probs"]) == pytest.approx(1)


def test_score_finds_a_garbled_text_less_likely(tmp_path: Path) -> None:
    pq.write_table(pa.table({"review": [TEXTS[0], " ".join(TEXTS[0].split()[::-1])]}), tmp_path / "in.parquet")
    br.submit(tmp_path / "in.parquet", output=tmp_path / "out", preset="score", target_col="review")
    plain, garbled = pq.read_table(tmp_path / "out").column("target_logprob").to_pylist()
    assert plain > garbled
