"""The benchmark of scoring from outside, and what it counts."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from batchrun.tokenizer import EchoTokenizer
from batchrun_jobs.bench.floor import Decoder, least_for_reading
from batchrun_jobs.bench_score import workload
from batchrun_jobs.bench_score.__main__ import main
from batchrun_jobs.bench_score.workload import ScoreWorkload

PROMPTS = ["one and", "one or", "two"]
CHOICES = [[" a", " b"], [" ab", " ac", " b"], [" a", " b"]]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt": PROMPTS, "choices": CHOICES, "texts": ["xyz"] * 3}), file)
    return file


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(main, [*arguments, "-m", "echo", "--repeat", "2", "--threads", "1"])


def test_choosing_and_scoring_agree_and_a_peer_that_cannot_be_run_is_left_out(source: Path, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    ways = ["--way", "batchrun", "--way", "vllm", "--way", "score:max_num_seqs=2"]
    result = bench(str(source), *ways, "--json", str(file))
    assert result.exit_code == 0, result.output
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["way", "batchrun", "score:max_num_seqs=2"]
    assert "vllm is left out: it needs a model with weights" in result.stderr
    found = json.loads(file.read_text())
    first, second = found["runs"].values()
    assert [len(runs) for runs in (first, second)] == [2, 2]
    assert [len(own) for own in first[0]["logprobs"]] == [2, 3, 2]
    assert first[0]["logprobs"] == second[1]["logprobs"]
    assert set(found["apart"].values()) == {0.0}
    # A choice of one token needs nothing but its prompt; each prompt is computed once.
    assert first[0]["computed_tokens"] < second[0]["computed_tokens"]


def test_what_is_further_apart_than_it_may_be_fails(source: Path) -> None:
    result = bench(str(source), "--way", "batchrun", "--tolerance", "-1")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == "error: batchrun is 0.0e+00 apart for each token"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--choices-col", "none"], "no column 'none'"),
        (["--choices-col", "texts"], "row 0: give a prompt and two different choices or more"),
        (["--way", "fast"], "no such name 'fast'; there are batchrun, score, lm-eval, vllm"),
        (["--way", "lm-eval"], "no way is left"),
        (["--way", "batchrun", "--python", "vlm=/bin/python"], "where PEER is one of lm-eval, vllm"),
    ],
)
def test_what_cannot_be_run_is_refused_in_a_line(source: Path, arguments: list[str], said: str) -> None:
    result = bench(str(source), *arguments)
    assert result.exit_code == 1
    assert said in result.stderr.splitlines()[-1]


def test_a_text_is_tokenised_with_its_prompt(source: Path) -> None:
    work = workload.read(source, "prompt", "choices", EchoTokenizer())
    encoded = EchoTokenizer().encode(["one or ac"], add_special_tokens=True)[0].tolist()
    assert [*work.prompt_ids[1], *work.choice_ids[1][1]] == encoded


def test_the_floor_counts_every_token_and_every_place_once() -> None:
    prompts, choices = ((1, 2, 3), (1, 2, 4)), (((5,), (6, 7)), ((6, 7), (6, 8)))
    work = ScoreWorkload(("", ""), (("a", "b"), ("a", "b")), prompts, choices)
    # 1 2 3 6 and 1 2 4 6; behind 3, 3 6, 4 and 4 6 something is asked.
    least = least_for_reading(work.texts, work.num_read, Decoder(linear_weights=10, head_weights=100, heads_width=1))
    pairs = 1 + 2 + 3 + 4 + 3 + 4
    assert least.flops == 2 * 10 * 6 + 2 * 100 * 4 + 4 * pairs
    assert least.num_bytes == 4 * (10 + 100)
