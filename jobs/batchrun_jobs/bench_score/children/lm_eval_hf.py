"""EleutherAI's harness with its transformers backend, which sorts and pads texts into batches and shares nothing."""

import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchrun_jobs.bench_score.contract import GivenChoices, Scored


def run(given: "GivenChoices") -> "Scored":
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    import torch
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    torch.set_num_threads(given["threads"])
    length = max(map(len, given["prompt_ids"])) + max(len(ids) for own in given["choice_ids"] for ids in own)
    model = HFLM(
        pretrained=given["model"],
        device="cpu",
        dtype="float32",
        batch_size=given["options"]["batch_size"],
        max_length=length + 1,
    )
    rows = zip(given["prompts"], given["choices"], strict=True)
    pairs = [(prompt, choice) for prompt, choices in rows for choice in choices]
    asked = [Instance("loglikelihood", doc={}, arguments=pair, idx=at) for at, pair in enumerate(pairs)]
    began = time.monotonic()
    found = iter(model.loglikelihood(asked, disable_tqdm=True))
    ended = time.monotonic()
    return {
        "began": began,
        "ended": ended,
        "logprobs": [[float(next(found)[0]) for _ in choices] for choices in given["choices"]],
        "computed_tokens": None,
    }
