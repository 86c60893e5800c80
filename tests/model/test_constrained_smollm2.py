"""The real model under constraints: each text is what transformers says with the same library before its choice."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from llguidance import LLMatcher, LLTokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessorList

from batchrun import lifecycle
from batchrun.checkpoint import cache_folder, resolve
from batchrun.grammars import LAYOUT
from batchrun.job import Job
from batchrun.quiet import quiet_transformers
from batchrun.stop import StopRequest
from tests.endurance.random_constraints import follows_regex, follows_schema
from tests.run.conftest import ignore

NUM_TOKENS = 48
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 16}, "people": {"type": "integer", "maximum": 99_999_999}},
    "required": ["city", "people"],
    "additionalProperties": False,
}
ASKED = (
    ("The capital of France as JSON:\n", {"json_schema": SCHEMA}),
    ("My phone number is ", {"regex": "[0-9]{3}-[0-9]{4}"}),
    ("Is the sky blue? Answer: ", {"guided_choice": ["certainly not", "certainly", "I do not know"]}),
    ("The capital of Italy as JSON:\n", {"json_schema": SCHEMA}),
)
GRAMMARS = (
    LLMatcher.grammar_from_json_schema(SCHEMA, defaults=LAYOUT),
    LLMatcher.grammar_from_regex("[0-9]{3}-[0-9]{4}"),
    LLMatcher.grammar_from_lark('start: "certainly not" | "certainly" | "I do not know"'),
    LLMatcher.grammar_from_json_schema(SCHEMA, defaults=LAYOUT),
)


def alone(model: Any, tokenizer: Any, vocabulary: LLTokenizer, prompt: str, grammar: str) -> str:
    """The prompt by itself, by transformers, every token that the grammar does not allow taken out."""
    matcher, ids = LLMatcher(vocabulary, grammar), tokenizer(prompt, return_tensors="pt").input_ids

    def keep_allowed(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if tokens.shape[1] > ids.shape[1]:
            matcher.consume_token(int(tokens[0, -1]))
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        is_allowed = np.unpackbits(bits, bitorder="little")[: scores.shape[1]]
        return scores.masked_fill(torch.from_numpy(is_allowed)[None] == 0, -torch.inf)

    output = model.generate(
        ids, max_new_tokens=NUM_TOKENS, do_sample=False, logits_processor=LogitsProcessorList([keep_allowed])
    )
    return tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)


def test_constrained_texts_are_those_of_generate_under_the_same_grammar(tmp_path: Path) -> None:
    checkpoint = resolve(None, revision=None, cache=cache_folder(), trust_remote_code=False)
    with quiet_transformers():
        tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint.folder)
        model: Any = AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype="float32")
    vocabulary = LLTokenizer(tokenizer.backend_tokenizer.to_str(), eos_token=list(checkpoint.spec.eos_token_ids))
    prompts, params = [prompt for prompt, _ in ASKED], [json.dumps(own) for _, own in ASKED]
    expected = [
        alone(model, tokenizer, vocabulary, prompt, grammar) for prompt, grammar in zip(prompts, GRAMMARS, strict=True)
    ]
    pq.write_table(pa.table({"prompt": prompts, "params": params}), tmp_path / "in.parquet")
    job = Job.load(
        {
            "inputs": (str(tmp_path / "in.parquet"),), "output": str(tmp_path / "out"), "params_col": "params",
            "chat": "off", "max_tokens": NUM_TOKENS, "kv_cache_memory": "64MiB",
        }
    )  # fmt: skip
    lifecycle.submit(job, ignore, StopRequest())
    texts = pq.read_table(tmp_path / "out").column("text").to_pylist()
    assert texts == expected
    assert follows_schema(SCHEMA, texts[0])
    assert follows_regex("[0-9]{3}-[0-9]{4}", texts[1])
