"""Beams on the real model: the texts are those of `transformers.generate(num_beams=…)`, float ties aside."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from batchrun import lifecycle
from batchrun.checkpoint import cache_folder, resolve
from batchrun.job import Job
from batchrun.quiet import quiet_transformers
from batchrun.stop import StopRequest
from tests.run.conftest import ignore

REVIEWS = Path(__file__).parents[2] / "examples" / "reviews.parquet"
QUESTION = "Here is a customer's review of a product. In one word, is the customer happy?\n\nReview: "
NUM_ROWS, NUM_TOKENS = 20, 16
TIE = 1e-3  # between the scores of two texts, a token


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    reviews = [text for text in pq.read_table(REVIEWS).column("review").to_pylist() if text]
    return [QUESTION + text + "\nAnswer:" for text in reviews[:NUM_ROWS]]


@pytest.fixture(scope="module")
def plain() -> Any:
    """Tokenizer and model of plain transformers."""
    folder = resolve(None, revision=None, cache=cache_folder(), trust_remote_code=False).folder
    with quiet_transformers():
        return AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder, dtype="float32")


def alone(plain: Any, prompt: str, **options: Any) -> str:
    tokenizer, model = plain
    encoded = tokenizer(prompt, return_tensors="pt")
    out = model.generate(**encoded, max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0, **options)
    return str(tokenizer.decode(out[0, encoded["input_ids"].shape[1] :], skip_special_tokens=True))


def score(plain: Any, prompt: str, text: str, length_penalty: float) -> float:
    """Of a text, as a search compares them."""
    tokenizer, model = plain
    ids = tokenizer(prompt + text, return_tensors="pt")["input_ids"]
    begin = tokenizer(prompt, return_tensors="pt")["input_ids"].shape[1]
    with torch.inference_mode():
        logprobs = model(ids).logits[0, begin - 1 : -1].log_softmax(-1)
    total = logprobs.gather(1, ids[0, begin:, None]).sum()
    return float(total) / (ids.shape[1] - begin) ** length_penalty


@pytest.mark.parametrize(
    ("options", "room"),
    [
        pytest.param({"num_beams": 2}, {}, id="two"),
        pytest.param({"num_beams": 4}, {}, id="four"),
        pytest.param({"num_beams": 4, "length_penalty": 0.0, "early_stopping": True}, {}, id="early"),
        pytest.param({"num_beams": 4}, {"kv_cache_memory": 10 << 20, "max_num_seqs": 16}, id="tight-pool"),
    ],
)
def test_texts_are_those_of_transformers(
    tmp_path: Path, plain: Any, prompts: list[str], options: dict[str, Any], room: dict[str, Any]
) -> None:
    pq.write_table(pa.table({"prompt": prompts}), tmp_path / "in.parquet")
    given = {"chat": "off", "max_tokens": NUM_TOKENS, **options, **room}
    job = Job.load({"inputs": (str(tmp_path / "in.parquet"),), "output": str(tmp_path / "out"), **given})
    outcome = lifecycle.submit(job, ignore, StopRequest())
    texts = pq.read_table(tmp_path / "out").column("text").to_pylist()
    assert (outcome.preemptions > 0) >= bool(room)
    differing = []
    for prompt, text in zip(prompts, texts, strict=True):
        other = alone(plain, prompt, **options)
        if text != other:
            penalty = options.get("length_penalty", 1.0)
            differing.append(abs(score(plain, prompt, text, penalty) - score(plain, prompt, other, penalty)))
    print("DIFFERING", differing, outcome.preemptions, outcome.recomputed_tokens)
    assert all(margin < TIE for margin in differing), differing
