"""Ways in real child processes, whose answers are known because a few lines of Python make them."""

import json
import os
from pathlib import Path

from batchrun.engine.echo import answer
from batchrun.tokenizer import EchoTokenizer
from batchrun_jobs.bench.children.start import peak_rss
from batchrun_jobs.bench.comparison import Comparison, compare
from batchrun_jobs.bench.process import Processes
from batchrun_jobs.bench.way import Way, parse
from batchrun_jobs.bench.workload import Workload
from tests.bench.conftest import MakeWay, workload
from tests.run.conftest import MEAN_OUTPUT_LEN

WORK = workload([[10, 11], [20], [30, 31, 32]], [3, 1, 2])
# Answers with the row's number, over and over; writes down that it ran.
COUNTING = """
    import time

    def run(given):
        with open(given["options"]["log"], "a") as log:
            print(given["options"]["name"], file=log)
        began = time.monotonic()
        token_ids = [[row] * length for row, length in enumerate(given["lengths"])]
        ended = time.monotonic()
        return {"began": began, "ended": ended, "token_ids": token_ids, "computed_tokens": 6, "useful": None}
"""
# The same but for the second token of row 2.
WRONG = COUNTING.replace("ended = time", "token_ids[2][1] = 9\n        ended = time")
FAILING = """
    def run(given):
        raise MemoryError("no room for keys")
"""


def compared(ways: list[Way], processes: Processes, repeat: int = 2, work: Workload = WORK) -> Comparison:
    return compare(ways, work, processes, repeat=repeat, tie=0.001, say=lambda line: None)


def test_ways_run_by_turns_each_in_its_own_process(way: MakeWay, processes: Processes, tmp_path: Path) -> None:
    log = tmp_path / "log"
    told = COUNTING.replace('print(given["options"]["name"]', 'import os; print(given["options"]["name"], os.getpid()')
    ways = [way(name, told, name=name, log=str(log)) for name in "ab"]
    found = compared(ways, processes, repeat=3)
    ran = [line.split() for line in log.read_text().splitlines()]
    assert [name for name, _ in ran] == list("ababab")
    assert len({process for _, process in ran} | {str(os.getpid())}) == 7
    assert {name: len(runs) for name, runs in found.runs.items()} == {"a": 3, "b": 3}
    assert found.complaints == ()


def test_a_run_is_what_the_child_says(way: MakeWay, processes: Processes, tmp_path: Path) -> None:
    found = compared([way("a", COUNTING, name="a", log=str(tmp_path / "log"))], processes, repeat=1)
    (run,) = found.runs["a"]
    assert run.token_ids == ((0, 0, 0), (1,), (2, 2))
    assert run.computed_tokens == 6
    assert run.ready_s > 0
    assert run.run_s >= 0
    # A Python at least, and not this one, in which torch may have been loaded.
    assert run.peak_rss is not None
    assert 1 << 20 < run.peak_rss < 100 << 20


def test_another_text_fails_and_is_named_by_row_and_position(
    way: MakeWay, processes: Processes, tmp_path: Path
) -> None:
    log = str(tmp_path / "log")
    found = compared([way("ours", COUNTING, name="", log=log), way("theirs", WRONG, name="", log=log)], processes)
    (complaint,) = found.complaints
    assert complaint.startswith("theirs, row 2: answer token 1 is 9, ours has 2;")
    assert found.agreements["ours"].num_equal == 3
    assert found.agreements["theirs"].num_equal == 2


def test_a_way_that_fails_is_tried_once_and_costs_the_others_nothing(
    way: MakeWay, processes: Processes, tmp_path: Path
) -> None:
    good = way("good", COUNTING, name="", log=str(tmp_path / "log"))
    found = compared([way("bad", FAILING), good], processes)
    (complaint,) = found.complaints
    assert complaint.startswith("bad failed: exit code 1\n  ")
    assert complaint.endswith("MemoryError: no room for keys")
    assert {name: len(runs) for name, runs in found.runs.items()} == {"good": 2}
    assert compared([way("bad", FAILING)], processes).runs == {}


def test_batchruns_own_process_gives_the_models_tokens(processes: Processes, way: MakeWay) -> None:
    """Through a whole job; rows that are equal are answered once and get the answer each."""
    tokenizer = EchoTokenizer()
    prompts = ("one", "two", "one and two", "one")
    lengths = (40, 3, 1, 40)
    encoded = tokenizer.encode(list(prompts), add_special_tokens=True)
    work = Workload(prompts, tuple(tuple(ids.tolist()) for ids in encoded), lengths)
    found = compared([parse("batchrun:max_num_seqs=2", {})], processes, repeat=1, work=work)
    expected = [answer(ids, length, MEAN_OUTPUT_LEN, ()) for ids, length in zip(encoded, lengths, strict=True)]
    (run,) = found.runs["batchrun:max_num_seqs=2"]
    assert [list(ids) for ids in run.token_ids] == expected
    assert run.computed_tokens is not None
    assert run.computed_tokens < work.prompt_tokens
    assert found.complaints == ()


def test_what_a_child_is_given(way: MakeWay, processes: Processes, tmp_path: Path) -> None:
    kept = """
        import json, os, shutil, sys
        from pathlib import Path

        def run(given):
            kept = Path(given["options"]["kept"])
            (kept / "given.json").write_text(json.dumps(given))
            (kept / "environment.json").write_text(json.dumps(dict(os.environ)))
            assert not any(Path(given["scratch"]).iterdir())
            return {
                "began": 0, "ended": 1, "token_ids": [[0] * n for n in given["lengths"]],
                "computed_tokens": None, "useful": None,
            }
    """
    compared([way("a", kept, kept=str(tmp_path))], processes, repeat=1)
    given = json.loads((tmp_path / "given.json").read_text())
    assert (given["prompt_ids"], given["lengths"]) == ([[10, 11], [20], [30, 31, 32]], [3, 1, 2])
    assert (given["model"], given["threads"], given["is_pinned"]) == (None, 1, False)
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["OMP_NUM_THREADS"] == "1"
    assert not list((processes.folder).iterdir())


def test_memory_is_the_peak_of_the_process_itself(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("Name:\tpython\nVmPeak:\t  900 kB\nVmHWM:\t  123 kB\nVmRSS:\t  7 kB\n")
    assert peak_rss(tmp_path / "status") == 123 * 1024
    assert peak_rss(tmp_path / "elsewhere") is None
