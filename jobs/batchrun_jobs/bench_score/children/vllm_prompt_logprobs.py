"""vLLM's offline `LLM.generate` with `prompt_logprobs`, in this process."""

import os
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchrun_jobs.bench_score.contract import GivenChoices, Scored


def run(given: "GivenChoices") -> "Scored":
    options = given["options"]
    # Read when vLLM is imported.
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": str(options["kv_cache_gib"]),
        # Threads are bound by OpenMP's own variables, if at all, as for every way.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # Everything in one process, whose memory is then the whole.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }
    from vllm import LLM, SamplingParams

    rows = zip(given["prompt_ids"], given["choice_ids"], strict=True)
    pairs = [(prompt, choice) for prompt, choices in rows for choice in choices]
    model = LLM(
        given["model"],
        dtype="float32",
        enable_prefix_caching=True,
        max_model_len=max(len(prompt) + len(choice) for prompt, choice in pairs) + 1,
        max_num_batched_tokens=options["max_num_batched_tokens"],
        max_num_seqs=options["max_num_seqs"],
        block_size=options["block_size"],
        disable_log_stats=True,
    )
    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    began = time.monotonic()
    answered = model.generate([{"prompt_token_ids": [*a, *b]} for a, b in pairs], sampling, use_tqdm=False)
    ended = time.monotonic()
    sums = iter([_sum(row.prompt_logprobs, *pair) for row, pair in zip(answered, pairs, strict=True)])
    return {
        "began": began,
        "ended": ended,
        "logprobs": [[next(sums) for _ in choices] for choices in given["choice_ids"]],
        "computed_tokens": None,
    }


def _sum(logprobs: Any, prompt: list[int], choice: list[int]) -> float:
    return float(sum(logprobs[len(prompt) + at][token].logprob for at, token in enumerate(choice)))
