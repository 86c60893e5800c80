"""Small workloads, and ways that are a few lines of Python in a real process."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import dedent

import pytest

from batchrun_jobs.bench.process import Processes
from batchrun_jobs.bench.threads import Threads
from batchrun_jobs.bench.way import Way
from batchrun_jobs.bench.workload import Workload

MakeWay = Callable[..., Way]


def workload(prompt_ids: Sequence[Sequence[int]], lengths: Sequence[int]) -> Workload:
    texts = tuple(" ".join(map(str, ids)) for ids in prompt_ids)
    return Workload(texts, tuple(map(tuple, prompt_ids)), tuple(lengths))


@pytest.fixture
def processes(tmp_path: Path) -> Processes:
    """One thread, and no model."""
    (tmp_path / "children").mkdir()
    return Processes(tmp_path / "children", Threads.choose(1, pin=False), model=None)


@pytest.fixture
def way(tmp_path: Path) -> MakeWay:
    """Makes a way from the body of a script; `{name}` in it is the way's label."""

    def make(label: str, body: str, **options: object) -> Way:
        script = tmp_path / f"{label}.py"
        script.write_text(dedent(body), encoding="utf-8")
        return Way(label, script, sys.executable, options)

    return make
