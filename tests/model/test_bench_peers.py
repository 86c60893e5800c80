"""The benchmark on the real model: batchrun and transformers, in their own processes, agree; the judge finds ties."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from batchrun.checkpoint import cache_folder, load_tokenizer, resolve
from batchrun.quiet import quiet_transformers
from batchrun_jobs.bench.agreement import Question, plain_distances
from batchrun_jobs.bench.comparison import compare
from batchrun_jobs.bench.process import Processes
from batchrun_jobs.bench.threads import Threads
from batchrun_jobs.bench.way import parse
from batchrun_jobs.bench.workload import Workload

PROMPTS = ("The capital of France is", "The capital of France was", "Once")
LENGTHS = (5, 3, 8)


@pytest.fixture(scope="module")
def workload() -> Workload:
    checkpoint = resolve(None, revision=None, cache=cache_folder(), trust_remote_code=False)
    tokenizer = load_tokenizer(checkpoint, tokenizer=None, chat_template=None, trust_remote_code=False)
    ids = tokenizer.encode(list(PROMPTS), add_special_tokens=True)
    return Workload(PROMPTS, tuple(tuple(one.tolist()) for one in ids), LENGTHS)


@pytest.fixture
def processes(tmp_path: Path) -> Processes:
    folder = resolve(None, revision=None, cache=cache_folder(), trust_remote_code=False).folder
    return Processes(tmp_path, Threads.choose(1, pin=False), folder)


# Five processes that load torch, one after another.
@pytest.mark.timeout(900)
def test_batchrun_and_transformers_agree(workload: Workload, processes: Processes) -> None:
    names = ["batchrun", "transformers:batch_size=2", "transformers-continuous:kv_tokens=640"]
    ways = [parse(name, {}) for name in names]
    found = compare(ways, workload, processes, repeat=1, tie=0.001, say=lambda line: None)
    assert found.complaints == ()
    assert list(found.runs) == names
    static = found.runs["transformers:batch_size=2"][0]
    # By length: rows 1 and 0 in one batch of 2 x 5 places, row 2 in another.
    assert static.useful == sum(LENGTHS) / (2 * 5 + 8)
    assert found.floor is not None
    assert found.floor.seconds > 0


def test_the_judge_is_a_plain_forward_pass(workload: Workload, processes: Processes) -> None:
    with quiet_transformers():
        model: Any = AutoModelForCausalLM.from_pretrained(processes.model, dtype=torch.float32)
    ids = workload.prompt_ids[0]
    with torch.inference_mode():
        largest, tokens = model(torch.tensor([ids])).logits[0, -1].topk(3)
    first, second, third = tokens.tolist()
    questions = [Question(ids, (first, second)), Question(ids, (third, second))]
    expected = [float(largest[0] - largest[1]), float(largest[0] - largest[2])]
    assert plain_distances(questions, processes) == pytest.approx(expected, abs=1e-4)
    assert sys.executable == parse("transformers", {}).python
