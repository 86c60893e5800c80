"""vLLM's offline `LLM.generate`, with chunked prefill and automatic prefix caching, in this process."""

import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchrun_jobs.bench.contract import Answered, Given


def run(given: "Given") -> "Answered":
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

    prompts, lengths = given["prompt_ids"], given["lengths"]
    model = LLM(
        given["model"],
        dtype="float32",
        enable_prefix_caching=True,
        max_model_len=max(len(ids) + length for ids, length in zip(prompts, lengths, strict=True)) + 1,
        max_num_batched_tokens=options["max_num_batched_tokens"],
        max_num_seqs=options["max_num_seqs"],
        block_size=options["block_size"],
        disable_log_stats=True,
    )
    sampling = [
        SamplingParams(max_tokens=length, temperature=0, ignore_eos=True, detokenize=False) for length in lengths
    ]
    began = time.monotonic()
    answered = model.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    ended = time.monotonic()
    cached = [row.num_cached_tokens for row in answered]
    return {
        "began": began,
        "ended": ended,
        "token_ids": [list(map(int, row.outputs[0].token_ids)) for row in answered],
        "computed_tokens": None if None in cached else sum(map(len, prompts)) - sum(cached),
        "useful": None,
    }
