"""Whole plans: what is in them, what is counted, and that they are there whole or not at all."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchrun.errors import DataError, InputMissing, StorageFailed, UsageError
from batchrun.job import Job
from batchrun.model_spec import ModelSpec
from batchrun.observe.events import Event, PlanProgress
from batchrun.plan import planner as plan_module
from batchrun.plan.estimate import PeakTokens, element_bytes
from batchrun.plan.plan import Plan, load_plan, read_unit
from batchrun.plan.planner import make_plan
from batchrun.plan.source import expand
from batchrun.tokenizer import EchoTokenizer

Planned = Callable[..., Plan]
RowsOf = Callable[[Plan], list[dict[str, Any]]]


def trie_size(texts: list[str]) -> int:
    """Tokens of the texts with each shared prefix counted once: nodes of the trie, a BOS at its root."""
    return len({text.encode()[:end] for text in texts for end in range(len(text.encode()) + 1)})


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(st.lists(st.text("ab", min_size=0, max_size=6) | st.none(), min_size=1, max_size=30))
def test_plan_accounts_for_every_row_and_token(planned: Planned, rows_of: RowsOf, cells: list[str | None]) -> None:
    plan = planned(pa.table({"prompt": pa.array(cells, pa.string())}), max_tokens=3)
    summary, rows = plan.summary, rows_of(plan)
    texts = [text for text in cells if text]
    unique = set(texts)
    answered = [number for row in rows for number in (row["row_idx"], *row["duplicates"])]
    assert sorted(answered) == list(range(len(cells)))
    good = [row for row in rows if row["error"] is None]
    assert rows[: len(good)] == good
    assert [EchoTokenizer().decode(row["token_ids"]) for row in good] == sorted(unique)
    assert all(cells[row["row_idx"]] == EchoTokenizer().decode(row["token_ids"]) for row in good)
    assert (summary.num_rows, summary.num_unique, summary.num_duplicates, summary.num_errors) == (
        len(cells), len(unique), len(texts) - len(unique), len(cells) - len(texts),
    )  # fmt: skip
    assert summary.prompt_tokens == sum(len(text) + 1 for text in unique)
    assert summary.duplicate_tokens == sum(len(text) + 1 for text in texts) - summary.prompt_tokens
    assert summary.unique_prompt_tokens == (trie_size(texts) if texts else 0)
    assert summary.saved_tokens == summary.prompt_tokens - summary.unique_prompt_tokens
    assert summary.max_tokens_total == 3 * len(unique)
    assert summary.longest_prompt == max((len(text) + 1 for text in texts), default=0)
    assert sum(unit.num_input_rows for unit in plan.units) == len(cells)


def test_every_kind_of_bad_row_is_counted_with_an_example(planned: Planned, rows_of: RowsOf) -> None:
    raw = pa.array([b"good", b"", None, b"\xff", b"x" * 2000, b"z" * 10], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 6, raw.buffers())
    params = [None, None, None, None, None, '{"top_k": -1}']
    plan = planned(pa.table({"t": text, "p": params}), prompt_col="t", params_col="p")
    assert plan.summary.errors == {"empty_prompt": 2, "invalid_params": 1, "invalid_utf8": 1, "overlong_prompt": 1}
    assert plan.summary.error_examples["empty_prompt"].startswith("row 1: ")
    assert (plan.summary.sample, plan.summary.sample_row) == ("good", 0)
    assert [(row["row_idx"], row["error"] and row["error"]["type"]) for row in rows_of(plan)] == [
        (0, None), (1, "empty_prompt"), (2, "empty_prompt"), (3, "invalid_utf8"), (4, "overlong_prompt"),
        (5, "invalid_params"),
    ]  # fmt: skip
    assert [unit.num_rows for unit in plan.units] == [1, 5]


def test_no_rows_make_an_empty_plan(planned: Planned) -> None:
    plan = planned(pa.table({"prompt": pa.array([], pa.string())}))
    assert plan.units == ()
    assert (plan.summary.num_rows, plan.summary.sample_row, plan.summary.longest_prompt_row) == (0, None, None)
    assert load_plan(plan.folder) == plan


def test_sampled_rows_are_not_folded(planned: Planned, rows_of: RowsOf) -> None:
    """Each has its own randomness; of the greedy ones only those with equal parameters have one answer."""
    sampled = '{"temperature": 1}'
    table = pa.table({"prompt": ["a"] * 5, "p": [None, sampled, sampled, None, '{"max_tokens": 2}']})
    rows = rows_of(planned(table, params_col="p", max_tokens=9))
    assert [(row["row_idx"], row["params"], row["duplicates"], row["keep_len"]) for row in rows] == [
        (0, None, [3], 2),
        (4, '{"max_tokens":2}', [], 2),
        (1, '{"temperature":1.0}', [], 2),
        (2, '{"temperature":1.0}', [], 0),
    ]


def test_output_is_bounded_by_the_models_length(planned: Planned) -> None:
    summary = planned(pa.table({"prompt": ["a" * 98, "b"]}), max_tokens=50, max_model_len=100).summary
    assert (summary.max_tokens_total, summary.longest_len) == (1 + 50, 100)
    assert summary.longest_kv_bytes == 100 * summary.kv_bytes_per_token


def test_plan_is_the_same_every_time_and_whatever_the_memory(
    planned: Planned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = np.random.default_rng(1)
    texts = ["".join(generator.choice(list("abc"), generator.integers(0, 9))) for _ in range(2000)]
    table = pa.table({"prompt": texts})

    def digest() -> tuple[Any, ...]:
        plan = planned(table)
        return plan.summary, plan.units, [unit.path.read_bytes() for unit in plan.units]

    first = digest()
    assert digest() == first
    original = plan_module.Order
    monkeypatch.setattr(plan_module, "Order", lambda folder: original(folder, 5000, 600))
    monkeypatch.setattr(plan_module, "scan", _tiny_scan(plan_module.scan))
    summary, units, _ = digest()
    assert (summary, units) == first[:2]
    assert [row for unit in units for row in read_unit(unit).to_pylist()] == _rows_in(first[2])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["input.parquet", "plan"]


def _tiny_scan(scan: Callable[..., Any]) -> Callable[..., Any]:
    return lambda files, columns, limit: scan(files, columns, limit, batch_rows=37)


def _rows_in(files: list[bytes]) -> list[dict[str, Any]]:
    return [row for raw in files for row in pa.ipc.open_file(pa.py_buffer(raw)).read_all().to_pylist()]


def test_stored_plan_is_the_plan_that_was_made(planned: Planned) -> None:
    plan = planned(pa.table({"prompt": ["a", "b", None]}))
    assert load_plan(plan.folder) == plan


def test_damaged_plan_is_named_and_a_missing_one_is_none(planned: Planned, tmp_path: Path) -> None:
    assert load_plan(tmp_path / "plan") is None
    plan = planned(pa.table({"prompt": ["a"]}))
    path = plan.folder / "plan.json"
    stored = json.loads(path.read_text())
    for damaged in (json.dumps({**stored, "format": 0}), "{", "[]", json.dumps({**stored, "units": 3})):
        path.write_text(damaged)
        with pytest.raises(StorageFailed, match=r"plan\.json.*--overwrite"):
            load_plan(plan.folder)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"prompt_col": "nope"}, DataError, "no column 'nope'"),
        ({"id_col": "prompd"}, DataError, "--id-col: .*did you mean 'prompt'"),
        ({"keep_cols": ("id", "x")}, DataError, "--keep-cols: .*no column 'x'"),
        ({"id_col": "id"}, DataError, "rows 0 and 2 have the same id '7' in column 'id'"),
        ({"id_col": "maybe"}, DataError, "row 1 has no id in column 'maybe'"),
        ({"on_overlong": "fail", "max_model_len": 3}, DataError, "row 1: the prompt has at least 3 tokens"),
        ({"chat": "on"}, UsageError, "has no chat template"),
    ],
)
def test_refused_plan_leaves_nothing_behind(
    planned: Planned, tmp_path: Path, fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    table = pa.table({"prompt": ["a", "bb", "c"], "id": [7, 8, 7], "maybe": ["x", None, "y"]})
    with pytest.raises(error, match=message):
        planned(table, **fields)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["input.parquet"]


def test_unique_ids_pass(planned: Planned) -> None:
    table = pa.table({"prompt": ["a", "bb"], "id": ["1", "11"]})
    assert planned(table, id_col="id", prompt_col="prompt").summary.num_rows == 2


def test_new_plan_replaces_the_old_one_and_what_a_crash_left(planned: Planned, tmp_path: Path) -> None:
    planned(pa.table({"prompt": ["a", "b"]}))
    (tmp_path / "plan.tmp").mkdir()
    (tmp_path / "plan.tmp" / "unit-00007.arrow").touch()
    plan = planned(pa.table({"prompt": ["a"]}))
    assert sorted(path.name for path in plan.folder.iterdir()) == ["plan.json", "prefixes.json", "unit-00000.arrow"]


def test_folder_that_cannot_be_written_is_a_storage_error(tmp_path: Path, spec: ModelSpec) -> None:
    pq.write_table(pa.table({"prompt": ["a"]}), tmp_path / "a.parquet")
    job = Job(inputs=(str(tmp_path / "a.parquet"),), output="out")
    (tmp_path / "file").touch()
    with pytest.raises(StorageFailed, match=r"cannot write the plan .*: Not a directory"):
        make_plan(job, expand(job.inputs), EchoTokenizer(), spec, tmp_path / "file" / "plan")


def test_file_that_vanishes_between_looking_and_reading_is_missing(tmp_path: Path, spec: ModelSpec) -> None:
    pq.write_table(pa.table({"prompt": ["a"]}), tmp_path / "a.parquet")
    job = Job(inputs=(str(tmp_path / "a.parquet"),), output="out")
    files = expand(job.inputs)
    (tmp_path / "a.parquet").unlink()
    with pytest.raises(InputMissing, match=r"a\.parquet: No such file"):
        make_plan(job, files, EchoTokenizer(), spec, tmp_path / "plan")


def test_progress_counts_rendered_and_then_ordered_rows(tmp_path: Path, spec: ModelSpec) -> None:
    pq.write_table(pa.table({"prompt": ["a", "a", "b"]}), tmp_path / "a.parquet")
    job = Job(inputs=(str(tmp_path / "a.parquet"),), output="out")
    events: list[Event] = []
    make_plan(job, expand(job.inputs), EchoTokenizer(), spec, tmp_path / "plan", events.append)
    assert events[0] == PlanProgress(3, "render")
    assert events[-1] == PlanProgress(3, "order", is_last=True)


def test_kv_bytes_follow_dtype_and_device(job: Callable[..., Job]) -> None:
    cases = [("float32", "cuda"), ("bfloat16", "cpu"), ("float16", "auto"), ("auto", "cuda"), ("auto", "auto")]
    assert [element_bytes(job(dtype=dtype, device=device)) for dtype, device in cases] == [4, 2, 2, 2, 4]


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(1, 4)), min_size=1, max_size=30),
    st.integers(1, 8),
    st.integers(1, 7),
    st.integers(1, 3),
)
def test_peak_is_the_largest_window_of_neighbours(
    drawn: list[tuple[int, int, int]], num_seqs: int, step: int, block_size: int
) -> None:
    rows: list[tuple[int, int, int]] = []
    for shared, own, output in drawn:
        common = min(shared, rows[-1][1]) if rows else 0
        rows.append((common, common + own + 1, output))
    peak = PeakTokens(num_seqs, block_size)
    for start in range(0, len(rows), step):
        shared, prompt, output = np.array(rows[start : start + step]).T
        peak.add(shared, prompt, output)
    windows = [rows[start : start + num_seqs] for start in range(len(rows))]

    def blocks_shared(shared: int, prompt: int) -> int:
        return min(shared, prompt - 1) // block_size

    blocks = [
        blocks_shared(*window[0][:2])
        + sum(-(-(prompt + output) // block_size) - blocks_shared(shared, prompt) for shared, prompt, output in window)
        for window in windows
    ]
    assert peak.tokens == max(blocks) * block_size


def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    """64,000 rows of 1.2 kB in one row group take no more than the first 16,000 of them; tokens alone: 220 MiB more."""
    script = """
import resource, sys
from pathlib import Path
from batchrun.job import Job
from batchrun.model_spec import ModelSpec
from batchrun.plan import planner, source
from batchrun.tokenizer import EchoTokenizer
spec = ModelSpec("echo", "Echo", 1, 1, 1, 259, 10_000, (2,), "echo")
order = planner.Order
planner.Order = lambda folder: order(folder, 8 << 20)
for limit in (16_000, 64_000):
    job = Job(inputs=(sys.argv[1],), output="out", limit=limit)
    made = planner.make_plan(job, source.expand(job.inputs), EchoTokenizer(), spec, Path(sys.argv[2]))
    print(made.summary.unique_prompt_tokens, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""
    numbers = np.random.default_rng(5).permutation(64_000).tolist()
    shared = "x" * 1195
    table = pa.table({"prompt": [f"{shared}{number:05}" for number in numbers]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=64_000, use_dictionary=False)
    arguments = [str(tmp_path / "a.parquet"), str(tmp_path / "plan")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], env=environment, capture_output=True, text=True, check=True
    )
    unique, mib = zip(*(map(int, line.split()) for line in done.stdout.splitlines()), strict=True)
    assert unique == tuple(
        len(shared) + trie_size([f"{each:05}" for each in numbers[:limit]]) for limit in (16_000, 64_000)
    )
    assert mib[1] - mib[0] < 64


def test_choices_of_a_row_take_room_one_at_a_time(planned: Callable[..., Plan]) -> None:
    """Of each all but the last token is computed, as a sequence of its own."""
    plan = planned(pa.table({"prompt": ["abc"]}), task="choose", choice=[" yes", " no", " nothing"], chat="off")
    assert plan.summary.longest_len == plan.summary.longest_prompt + len(" nothing") - 1
