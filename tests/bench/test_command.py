"""The command from outside: the table on stdout, the rest on stderr, and the exit code."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from batchrun_jobs.bench.__main__ import main


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt": ["one", "two and", "two or"], "n": [5, 9, 2]}), file)
    return file


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(main, [*arguments, "-m", "echo", "--repeat", "1", "--threads", "1"])


def test_schedules_are_compared_and_a_peer_that_cannot_be_run_is_left_out(source: Path, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    ways = ["--way", "chunked", "--way", "vllm", "--way", "static:max_num_seqs=2"]
    result = bench(str(source), "--len-col", "n", *ways, "--json", str(file))
    assert result.exit_code == 0, result.output
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["way", "chunked", "static:max_num_seqs=2"]
    assert "vllm is left out: it needs a model with weights" in result.stderr
    first, second = json.loads(file.read_text())["ways"]
    assert first["runs"][0]["token_ids"] == second["runs"][0]["token_ids"]
    assert [len(ids) for ids in first["runs"][0]["token_ids"]] == [5, 9, 2]
    # Static batching keeps places for rows that are done.
    assert second["useful"] < 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "Give --len-col or --max-tokens"),
        (["--len-col", "n", "--max-tokens", "3"], "one of them"),
        (["--len-col", "m"], "no column 'm'"),
        (["--max-tokens", "3", "--way", "fcfs", "--way", "fcfs"], "named twice"),
        (["--max-tokens", "3", "--way", "transformers"], "no way is left"),
        (["--max-tokens", "3", "--way", "fcfs:max_tokens=3"], "no such name 'max_tokens'"),
        (["--max-tokens", "3", "--way", "fcfs", "--python", "fcfs=/bin/python"], "where PEER is one of"),
    ],
)
def test_what_cannot_be_run_is_refused_in_a_line(source: Path, arguments: list[str], said: str) -> None:
    result = bench(str(source), *arguments)
    assert result.exit_code == 1
    assert said in result.stderr.splitlines()[-1]


def test_a_way_that_fails_makes_the_command_fail_after_the_table(source: Path) -> None:
    # No pool holds a row of the workload.
    ways = ["--way", "batchrun", "--way", "batchrun:kv_cache_memory=64,block_size=8"]
    result = bench(str(source), "--max-tokens", "9", *ways)
    assert result.exit_code == 1
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["way", "batchrun"]
    assert "error: batchrun:kv_cache_memory=64,block_size=8 failed: exit code 1" in result.stderr
    assert "the pool holds 8" in result.stderr
