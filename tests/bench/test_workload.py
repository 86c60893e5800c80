"""Reading a workload, and what is refused."""

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun.errors import DataError
from batchrun.tokenizer import EchoTokenizer
from batchrun_jobs.bench.workload import Workload, read


@pytest.fixture
def source(tmp_path: Path) -> Callable[..., Path]:
    def write(**columns: list[object]) -> Path:
        pq.write_table(pa.table(columns), tmp_path / "in.parquet")
        return tmp_path / "in.parquet"

    return write


def test_prompts_are_tokenised_and_lengths_read(source: Callable[..., Path]) -> None:
    file = source(body=["a", "bc"], n=[3, 1])
    ids = ((1, ord("a") + 3), (1, ord("b") + 3, ord("c") + 3))
    assert read(file, "body", "n", EchoTokenizer()) == Workload(("a", "bc"), ids, (3, 1))
    same = read(file, "body", 7, EchoTokenizer())
    assert (same.lengths, same.prompt_tokens, same.output_tokens) == ((7, 7), 5, 14)


def test_a_workload_is_a_jobs_input(tmp_path: Path) -> None:
    Workload(("a", "b"), ((4,), (5,)), (3, 1)).save(tmp_path / "rows.parquet")
    assert pq.read_table(tmp_path / "rows.parquet").to_pylist() == [
        {"prompt": "a", "params": '{"max_tokens": 3}'},
        {"prompt": "b", "params": '{"max_tokens": 1}'},
    ]


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"prompt": ["a"]}, "no column 'n'; it has: prompt"),
        ({"prompt": ["a", None], "n": [1, 1]}, "row 1: column 'prompt' holds no text"),
        ({"prompt": ["a", "b"], "n": [1, 0]}, "row 1: column 'n' holds 0"),
        ({"prompt": ["a"], "n": [1.5]}, "row 0: column 'n' holds 1.5"),
        ({"prompt": [], "n": []}, "no rows"),
    ],
)
def test_what_cannot_be_run_is_refused(
    source: Callable[..., Path], columns: dict[str, list[object]], said: str
) -> None:
    with pytest.raises(DataError) as refused:
        read(source(**columns), "prompt", "n", EchoTokenizer())
    assert said in str(refused.value)
