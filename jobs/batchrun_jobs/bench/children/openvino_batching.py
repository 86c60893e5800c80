"""OpenVINO GenAI's continuous batching with paged attention and prefix caching, on a model exported in float32."""

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import openvino
import openvino_genai

if TYPE_CHECKING:
    from batchrun_jobs.bench.contract import Answered, Given


def run(given: "Given") -> "Answered":
    """With the option `warm` the first row is prefilled alone, so that the others find its prefix in the cache.

    Without it rows that are handed over together share nothing with each other.
    """
    pipeline = _pipeline(given)
    inputs = [openvino.Tensor(np.array([ids], dtype=np.int64)) for ids in given["prompt_ids"]]
    asked = [_greedy(length) for length in given["lengths"]]
    began = time.monotonic()
    if given["options"]["warm"]:
        pipeline.generate(inputs[:1], [_greedy(1)])
    answered = pipeline.generate(inputs, asked)
    ended = time.monotonic()
    token_ids = [list(map(int, row.m_generation_ids[0])) for row in answered]
    return {"began": began, "ended": ended, "token_ids": token_ids, "computed_tokens": None, "useful": None}


def _pipeline(given: "Given") -> Any:
    options = given["options"]
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = options["kv_cache_gib"]
    scheduler.enable_prefix_caching = True
    scheduler.dynamic_split_fuse = True
    scheduler.max_num_batched_tokens = options["max_num_batched_tokens"]
    scheduler.max_num_seqs = options["max_num_seqs"]
    properties = {
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": given["threads"],
        "PERFORMANCE_HINT": "LATENCY",
        "ENABLE_CPU_PINNING": given["is_pinned"],
    }
    if options["kv_cache_precision"]:
        properties["KV_CACHE_PRECISION"] = options["kv_cache_precision"]
    return openvino_genai.ContinuousBatchingPipeline(options["ir"], scheduler, "CPU", properties)


def _greedy(num_tokens: int) -> Any:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = num_tokens
    config.ignore_eos = True
    config.do_sample = False
    config.apply_chat_template = False
    return config
