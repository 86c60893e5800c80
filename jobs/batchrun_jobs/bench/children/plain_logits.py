"""The judge where two ways chose different tokens: the logits of a plain float32 forward pass of transformers."""

from typing import TYPE_CHECKING, Any, TypedDict

import torch
import transformers

if TYPE_CHECKING:
    from batchrun_jobs.bench.contract import Given


class Logits(TypedDict):
    """For each case the logits of its candidates, and the largest one of all tokens."""

    candidates: list[list[float]]
    largest: list[float]


@torch.inference_mode()
def run(given: "Given") -> Logits:
    """`prompt_ids` are the tokens before each place in question, the option `candidates` the tokens chosen there."""
    torch.set_num_threads(given["threads"])
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(str(given["model"]), dtype=torch.float32)
    candidates, largest = [], []
    for ids, chosen in zip(given["prompt_ids"], given["options"]["candidates"], strict=True):
        logits = model(torch.tensor([ids]), use_cache=False, logits_to_keep=1).logits[0, -1]
        candidates.append(logits[chosen].tolist())
        largest.append(logits.max().item())
    return {"candidates": candidates, "largest": largest}
