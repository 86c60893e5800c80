"""transformers' own continuous batching, over pages of keys and values that equal prefixes may share."""

import time
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers.generation.configuration_utils import ContinuousBatchingConfig

if TYPE_CHECKING:
    from batchrun_jobs.bench.contract import Answered, Given

# No token: nothing ends a row before its length.
_NO_EOS = -1


def run(given: "Given") -> "Answered":
    torch.set_num_threads(given["threads"])
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        str(given["model"]), dtype=torch.float32, attn_implementation="sdpa"
    )
    generation = model.generation_config
    generation.eos_token_id, generation.pad_token_id, generation.do_sample = _NO_EOS, 0, False
    with (
        torch.inference_mode(),
        model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=_config(given), warmup=False
        ) as manager,
    ):
        began = time.monotonic()
        token_ids = _answered(manager, given)
        ended = time.monotonic()
    return {"began": began, "ended": ended, "token_ids": token_ids, "computed_tokens": None, "useful": None}


def _config(given: "Given") -> ContinuousBatchingConfig:
    options = given["options"]
    longest = max(len(ids) + length for ids, length in zip(given["prompt_ids"], given["lengths"], strict=True))
    page = options["page_size"]
    return ContinuousBatchingConfig(
        page_size=page,
        num_blocks=max(options["kv_tokens"], 2 * longest) // page + 1,
        max_batch_tokens=options["max_num_batched_tokens"],
        max_requests_per_batch=options["max_num_seqs"],
        use_cuda_graph=False,
        use_async_batching=False,
    )


def _answered(manager: Any, given: "Given") -> list[list[int]]:
    """Raises RuntimeError when the manager gives up."""
    lengths = given["lengths"]
    for row, (ids, length) in enumerate(zip(given["prompt_ids"], lengths, strict=True)):
        manager.add_request(ids, request_id=str(row), max_new_tokens=length, eos_token_id=_NO_EOS)
    found: dict[int, list[int]] = {}
    while len(found) < len(lengths):
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            found[int(result.request_id)] = [int(token) for token in result.generated_tokens]
        elif result is None and not manager.is_running():
            raise RuntimeError(f"continuous batching stopped after {len(found)} of {len(lengths)} rows")
    return [found[row] for row in range(len(lengths))]
