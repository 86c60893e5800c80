"""transformers' `generate` on left-padded batches of rows with similar output lengths, each run to its longest row."""

import time
from typing import TYPE_CHECKING, Any

import torch
import transformers

if TYPE_CHECKING:
    from batchrun_jobs.bench.contract import Answered, Given


def run(given: "Given") -> "Answered":
    torch.set_num_threads(given["threads"])
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(str(given["model"]), dtype=torch.float32)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    prompts, lengths = given["prompt_ids"], given["lengths"]
    order = sorted(range(len(prompts)), key=lambda row: (lengths[row], len(prompts[row])))
    token_ids: list[list[int]] = [[] for _ in prompts]
    num_places = num_computed = 0
    began = time.monotonic()
    for start in range(0, len(order), given["options"]["batch_size"]):
        rows = order[start : start + given["options"]["batch_size"]]
        longest = max(lengths[row] for row in rows)
        ids, mask = _padded([prompts[row] for row in rows])
        answered = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=longest, do_sample=False)
        num_places += longest * len(rows)
        num_computed += ids.numel()
        for row, answer in zip(rows, answered[:, ids.shape[1] :].tolist(), strict=True):
            token_ids[row] = answer[: lengths[row]]
    ended = time.monotonic()
    return {
        "began": began,
        "ended": ended,
        "token_ids": token_ids,
        "computed_tokens": num_computed,
        "useful": sum(lengths) / num_places,
    }


def _padded(prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask, both int64 [num_rows, longest prompt], padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    return ids, mask
