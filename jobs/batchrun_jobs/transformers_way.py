"""The rows of a Parquet file answered by plain `transformers.generate`, as one would without batchrun.

Called with the file, the batch size and the model; the last line on stdout is the measurement as JSON.
"""

import json
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
from transformers import AutoModelForCausalLM, AutoTokenizer

from batchrun.checkpoint import cache_folder, resolve
from batchrun.quiet import quiet_transformers


def main() -> None:
    """Left-padded batches of rows with similar output lengths, each run to its longest row."""
    source, batch_size, model_name = sys.argv[1], int(sys.argv[2]), sys.argv[3] or None
    checkpoint = resolve(model_name, revision=None, cache=cache_folder(), trust_remote_code=False)
    with quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(checkpoint.folder, padding_side="left")
        model = AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype="float32")
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = tokenizer.pad_token_id or 0
    table = pq.read_table(Path(source))
    prompts = table.column("prompt").to_pylist()
    lengths = [json.loads(params)["max_tokens"] for params in table.column("params").to_pylist()]
    order = sorted(range(len(prompts)), key=lambda row: lengths[row])
    texts = [""] * len(prompts)
    num_slots = 0
    began = time.perf_counter()
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        longest = max(lengths[row] for row in rows)
        encoded = tokenizer([prompts[row] for row in rows], return_tensors="pt", padding=True)
        answered = model.generate(**encoded, max_new_tokens=longest, do_sample=False)
        num_slots += longest * len(rows)
        for row, ids in zip(rows, answered[:, encoded["input_ids"].shape[1] :], strict=True):
            texts[row] = tokenizer.decode(
                ids[: lengths[row]], skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
    seconds = time.perf_counter() - began
    measured = {"seconds": seconds, "output_tokens": sum(lengths), "texts": texts}
    print(json.dumps(measured | {"occupancy": sum(lengths) / num_slots}))


if __name__ == "__main__":
    main()
