"""The real model: what a job answers is what plain `transformers.generate` answers."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from batchrun import lifecycle
from batchrun.checkpoint import cache_folder, resolve
from batchrun.job import Job
from batchrun.quiet import quiet_transformers
from batchrun.stop import StopRequest
from tests.run.conftest import ignore

NUM_TOKENS = 12
REVIEWS = Path(__file__).parents[2] / "examples" / "reviews.parquet"
QUESTION = "Here is a customer's review of a product. In one word, is the customer happy?\n\nReview: "


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    """A shared instruction before texts of very different lengths, one of them repeated."""
    reviews = [text for text in pq.read_table(REVIEWS).column("review").to_pylist() if text]
    longest = " ".join(reviews[:12])
    return [QUESTION + text for text in (*reviews[:8], longest, reviews[2], reviews[3][:5])]


@pytest.fixture(scope="module")
def alone(prompts: list[str]) -> list[str]:
    """Each prompt on its own, by transformers."""
    folder = resolve(None, revision=None, cache=cache_folder(), trust_remote_code=False).folder
    with quiet_transformers():
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    model.generation_config.eos_token_id = None
    texts = []
    for prompt in prompts:
        encoded = tokenizer(prompt, return_tensors="pt")
        out = model.generate(**encoded, max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0)
        texts.append(tokenizer.decode(out[0, encoded["input_ids"].shape[1] :], skip_special_tokens=True))
    return texts


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="as-is"),
        pytest.param({"max_num_batched_tokens": 63, "max_num_seqs": 3}, id="small-chunks"),
        pytest.param({"kv_cache_memory": 34 << 20, "preemption": "swap", "block_size": 4}, id="tight-pool"),
        pytest.param({"deterministic": True, "max_num_seqs": 5}, id="deterministic"),
    ],
)
def test_a_jobs_answers_are_those_of_the_model_alone(
    tmp_path: Path, prompts: list[str], alone: list[str], options: dict[str, Any]
) -> None:
    pq.write_table(pa.table({"prompt": prompts}), tmp_path / "in.parquet")
    given = {"chat": "off", "ignore_eos": True, "max_tokens": NUM_TOKENS, **options}
    job = Job.load({"inputs": (str(tmp_path / "in.parquet"),), "output": str(tmp_path / "out"), **given})
    outcome = lifecycle.submit(job, ignore, StopRequest())
    assert pq.read_table(tmp_path / "out").column("text").to_pylist() == alone
    assert outcome.duplicates == 1
    assert outcome.cached_tokens > 0
